"""The contracts of `with_gradient`, `from_value_and_gradient` and `custom_jvp`"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import functions as fn
from shared import WRAPS, constant
from slope_forms import FORMS, by_jvp


def gradient(f, *args, sources=None, upstream=None):
    with tf.GradientTape() as tape:
        tape.watch([a for a in tf.nest.flatten(args) if tf.is_tensor(a) and a.dtype.is_floating])
        y = f(*args)
    return tape.gradient(y, args if sources is None else sources, upstream)


def nth_derivative(f, n, x):
    if n == 0:
        return f(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = nth_derivative(f, n - 1, x)
    return tape.gradient(y, x)


EVERY = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


def ways_to_write_it(f, grad, **options):
    """All ways to make the same form."""

    def later():
        form = sgtrick.with_gradient(f, **options)
        form.defgrad(grad)
        return form

    return {
        "function": sgtrick.with_gradient(f, grad, **options),
        "decorator": sgtrick.with_gradient(grad=grad, **options)(f),
        "rule later": later(),
    }


class TestWithGradient:
    @pytest.mark.parametrize("way", ["function", "decorator", "rule later"])
    @WRAPS
    def test_ways_to_write_it(self, way, wrap):
        h = ways_to_write_it(fn.misled(fn.scalar), fn.scalar_gradient)[way]
        x = constant([1.0, 2.0, 3.0])
        np.testing.assert_allclose(wrap(gradient)(wrap(h), x)[0], fn.scalar_gradient(x))

    def test_without_a_rule(self):
        @sgtrick.with_gradient
        def f(x):
            return x

        with pytest.raises(TypeError, match=r"f has no gradient function.*@f\.defgrad"):
            f(1.0)

    @WRAPS
    @pytest.mark.parametrize("argnums", ["x", 1, -1, ("x",), [1]])
    def test_the_others_keep_autodiff(self, wrap, argnums):
        v = tf.Variable(2.0, dtype=tf.float64)
        many = isinstance(argnums, (list, tuple))

        def f(a, x, *, b=5.0):
            return a**2 * tf.stop_gradient(x) * b * v

        def grad(a, x, *, b):
            g = constant(7.0)
            return (g,) if many else g

        h = sgtrick.with_gradient(f, grad, argnums=argnums)
        a, x, b = constant(3.0), constant(11.0), constant(13.0)

        @wrap
        def run(a, x, b):
            with tf.GradientTape() as tape:
                tape.watch([a, x, b])
                y = h(a, x=x, b=b)
            return y, tape.gradient(y, [a, x, b, v])

        y, (by_a, by_x, by_b, by_v) = run(a, x, b)
        assert y.numpy() == 9 * 11 * 13 * 2
        assert by_x.numpy() == 7.0
        assert by_a.numpy() == 2 * 3 * 11 * 13 * 2
        assert by_b.numpy() == 9 * 11 * 2
        assert by_v.numpy() == 9 * 11 * 13

    def test_keras_variables_read_inside_keep_autodiff(self):
        v = keras.Variable(np.float32(3.0))
        h = sgtrick.with_gradient(lambda x: tf.stop_gradient(x) * v, lambda x: 5.0)
        x = tf.constant(2.0)
        by_x, by_v = gradient(h, x, sources=[x, v.value])
        assert (by_x.numpy(), by_v.numpy()) == (5.0, 2.0)

    @WRAPS
    def test_structures_keywords_and_defaults(self, wrap):
        def f(params, scale=2.0, *, offset):
            return scale * tf.stop_gradient(params["a"] * params["b"][0]) + offset

        def grad(params, scale, *, offset):
            return {"a": constant(10.0) * scale, "b": [None, None]}

        h = sgtrick.with_gradient(f, grad, argnums="params")
        params = {"a": constant(3.0), "b": [constant(4.0), 7]}

        @wrap
        def run(a):
            return gradient(lambda a: h({**params, "a": a}, offset=constant(1.0)), a)

        assert run(params["a"])[0].numpy() == 20.0
        assert h(params, offset=1.0).numpy() == 25.0

    def test_any_number_of_arguments(self):
        """Which the name of `*args` or `**kwargs` does not select."""

        def f(x, *args, **kwargs):
            return x * args[0] * args[1] * kwargs["k"]

        xs = [constant(x) for x in (2.0, 3.0, 5.0, 7.0)]
        call = lambda h: gradient(lambda x, y, z, k: h(x, y, z, k=k), *xs)  # noqa: E731
        rule = lambda *_, **__: (100.0, 200.0)  # noqa: E731
        found = call(sgtrick.with_gradient(f, rule, argnums=("k", 2)))
        np.testing.assert_allclose(found, [3 * 5 * 7, 2 * 5 * 7, 200, 100])
        for name, message in {
            "args": r"argnums has 'args', which is no argument .*'args\[1\]', 'k'\], or .* -3 to 2\.",
            "kwargs": r"argnums has 'kwargs', which is no argument of this call of f\. Pass one of",
        }.items():
            with pytest.raises(ValueError, match=message):
                call(sgtrick.with_gradient(f, rule, argnums=(0, name)))

    def test_functions_without_a_signature(self):
        h = sgtrick.with_gradient(max, lambda a, b: 5.0)
        assert gradient(h, tf.constant(2.0), tf.constant(1.0))[0].numpy() == 5.0

    @WRAPS
    def test_the_first_derivative_does_not_differentiate_grad(self, wrap):
        @tf.custom_gradient
        def undifferentiable(x):
            def grad(u):
                raise AssertionError("grad was differentiated")

            return 2 * x, grad

        h = sgtrick.with_gradient(lambda x: x**2, undifferentiable)
        assert wrap(gradient)(h, tf.constant(3.0))[0].numpy() == 6.0

    @WRAPS
    def test_infinite_gradients(self, wrap):
        # The derivative of 2 sqrt(x) is infinite at 0, and the one of that is too.
        h = sgtrick.with_gradient(lambda x: 2 * tf.sqrt(x), lambda x: tf.math.rsqrt(x))
        x = constant([0.0, 4.0])
        np.testing.assert_array_equal(h(x), [0.0, 4.0])
        np.testing.assert_allclose(wrap(gradient)(h, x)[0], [np.inf, 0.5])

    def test_composition_does_not_retrace(self):
        traces = []

        def f(x):
            traces.append(x)
            return x**2

        run = tf.function(sgtrick.with_gradient(f, lambda x: 2 * x))
        for i in range(5):
            run(tf.constant(float(i)))
        assert len(traces) == 1

    @WRAPS
    def test_variables_made_on_the_first_call(self, wrap):
        made = []

        def f(x):
            if not made:
                made.append(tf.Variable(3.0))
            return tf.stop_gradient(x) * made[0]

        h = wrap(sgtrick.with_gradient(f, lambda x: 5.0))
        x = tf.constant(2.0)
        h(x)
        by_x, by_v = gradient(h, x, sources=[x, made[0]])
        assert (by_x.numpy(), by_v.numpy()) == (5.0, 2.0)

    @pytest.mark.parametrize(
        ("f", "grad", "options", "error", "message"),
        [
            (lambda x: x, lambda x: x, {"argnums": 1.5}, TypeError, r"ints or parameter names, got 1\.5"),
            (lambda x: x, lambda x: x, {"argnums": "y"}, ValueError, r"argnums has 'y'.*one of the names \['x'\]"),
            (lambda x: x, lambda x: x, {"argnums": (0, "x")}, ValueError, r"argnums=\(0, 'x'\) names an argument of <lambda> twice"),
            (lambda x: (x, x), lambda x: x, {}, TypeError, r"<lambda> must return one tensor, got a tuple of 2\..*custom_jvp"),
            (lambda x: {"y": x}, lambda x: x, {}, TypeError, r"<lambda> must return one tensor, got a dict\."),
            (lambda x, y: x, lambda x: x, {}, TypeError, r"<lambda>\(\) missing a required argument: 'y'"),
            (lambda x: x, 3.0, {}, TypeError, r"grad must be a function, got float\."),
            ("f", lambda x: x, {}, TypeError, r"f must be a function, got str\."),
            (lambda x: x, lambda x: x, {"argnums": 1}, ValueError, r"argnums has 1, .* a position: from -1 to 0\."),
            (lambda x: tf.constant(1), lambda x: x, {}, TypeError, r"<lambda> returned dtype int32, which has no derivatives"),
            (lambda x: x, lambda x: tf.ones([3]), {}, ValueError, r"the value \[2\], the gradient with respect to x \[3\] and x \[2\] do not fit"),
            (lambda x: x, lambda x: [x, x], {}, ValueError, r"the gradient with respect to x must have the structure of x"),
            (lambda x: x, lambda x: x, {"argnums": (0,)}, ValueError, r"tuple of 1 gradients, one for each of argnums=\(0,\), got \w*Tensor"),
            (lambda x: x, lambda x: (x, x), {"argnums": (0,)}, ValueError, r"got tuple of 2"),
            (lambda x: x, lambda x: "a", {}, TypeError, r"the gradient with respect to x has dtype string"),
        ],
    )  # fmt: skip
    @WRAPS
    def test_misuse(self, wrap, f, grad, options, error, message):
        with pytest.raises(error, match=message):
            wrap(gradient)(sgtrick.with_gradient(f, grad, **options), constant([1.0, 2.0]))

    @pytest.mark.parametrize("form", ["with_gradient", "from_value_and_gradient"])
    def test_arguments_that_are_no_numbers(self, form):
        def f(thing, x):
            return x if form == "with_gradient" else (x, x)

        options = {"grad": f} if form == "with_gradient" else {}
        h = getattr(sgtrick, form)(f, **options)
        with pytest.raises(
            TypeError, match=r"selects thing of f, .* no derivative: object\. Select"
        ):
            h(object(), constant(1.0))

    @WRAPS
    def test_variables_among_the_others_are_those_of_the_call(self, wrap):
        v = tf.Variable(5.0, dtype=tf.float64)
        variables = tf.Variable(1.0, dtype=tf.float64)
        x = constant(1.0)

        def assigns(x, now):
            y = x**2 * now
            v.assign(7.0)
            return y

        rules = [
            sgtrick.with_gradient(lambda x, v: x**2 * v, lambda x, v: 2 * x * v),
            sgtrick.with_gradient(assigns, lambda x, v: 2 * x * v),
            sgtrick.with_gradient(
                lambda x, v: x**2 * v * variables,
                lambda x, v, variables: (2 * x * v, [x**2 * v]),
            ),
        ]
        for h in rules:
            v.assign(5.0)

            @wrap
            def late(h=h):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = h(x, v)
                v.assign(100.0)
                return tape.gradient(y, x)

            np.testing.assert_array_equal(late(), 10)

    @EVERY
    @WRAPS
    def test_functions_that_have_no_derivative_of_their_own(self, wrap, make):
        def f(x):  # TensorFlow has no gradient of this op
            return tf.image.adjust_contrast(x, 2.0)

        h = make(f, lambda x: 3 * x)
        x = tf.reshape(tf.range(12.0), [2, 2, 3])
        np.testing.assert_allclose(gradient(wrap(h), x)[0], 3 * x)

    @EVERY
    def test_autograph_converts_the_functions_and_not_the_form(self, make):
        def f(x):
            return x**2 if tf.reduce_sum(x) > 0 else -(x**2)

        def grad(x):
            return 2 * x if tf.reduce_sum(x) > 0 else -2 * x

        h = make(f, grad)
        for x in (constant([1.0, 2.0]), constant([-1.0, -2.0])):
            np.testing.assert_array_equal(gradient(tf.function(h), x)[0], grad(x))

    def test_a_gradient_by_an_int(self):
        h = sgtrick.with_gradient(lambda x, n: x * n, lambda x, n: (1.0, 1.0), argnums=(0, 1))
        with pytest.raises(
            TypeError, match=r"n has no derivatives, but the gradient with respect to n is not None"
        ):
            gradient(lambda x: h(x, 3), tf.constant(1.0))


class TestOrders:
    """Derivatives of every order are those of the rule, against autodiff of the true function."""

    @staticmethod
    def true(x):
        return tf.exp(x) * tf.sin(x)

    @staticmethod
    def derivative(x):
        return tf.exp(x) * (tf.sin(x) + tf.cos(x))

    @WRAPS
    @EVERY
    def test_every_derivative(self, wrap, make):
        x, h = constant(0.7), make(fn.misled(self.true), self.derivative)
        for n in range(5):
            got = wrap(lambda x, n=n: nth_derivative(h, n, x))(x)
            np.testing.assert_allclose(got, nth_derivative(self.true, n, x), rtol=1e-12)

    @WRAPS
    @pytest.mark.parametrize("make", [sgtrick.with_gradient, by_jvp])
    def test_a_rule_may_call_its_function(self, wrap, make):
        h = make(fn.misled(tf.exp), lambda x: h(x))
        x = constant(0.7)
        for n in range(4):
            got = wrap(lambda x, n=n: nth_derivative(h, n, x))(x)
            np.testing.assert_allclose(got, tf.exp(x), rtol=1e-12)

    @WRAPS
    @pytest.mark.parametrize("form", ["gradient", "jvp"])
    def test_a_rule_that_differentiates_its_function(self, wrap, form):
        def f(x, n):
            return tf.ones_like(x) if n == 0 else x * power(x, n - 1)

        def by_x(x, n):
            if n == 0:
                return 0 * x  # a constant, and said to be one
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = power(x, n - 1)
            return y + x * tape.gradient(y, x, unconnected_gradients="zero")

        if form == "gradient":
            power = sgtrick.with_gradient(f, by_x)
        else:
            power = sgtrick.custom_jvp(f)
            power.defjvp(lambda primals, t: (None, by_x(*primals) * t[0]))
        x = constant(3.0)
        for n, expected in enumerate([27.0, 27.0, 18.0, 6.0]):
            got = wrap(lambda x, n=n: nth_derivative(lambda x: power(x, 3), n, x))(x)
            np.testing.assert_allclose(got, expected, rtol=1e-12)

    @EVERY
    def test_a_gradient_that_is_not_connected_refuses(self, make):
        h = make(lambda x: tf.sin(x), lambda x: tf.stop_gradient(tf.cos(x)))

        def second(x):
            return nth_derivative(lambda x: h(x) ** 2, 2, x)

        x, message = constant(0.7), r"sees no connection from the gradient to the point"
        np.testing.assert_allclose(nth_derivative(h, 1, x), tf.cos(x))
        with pytest.raises(LookupError, match=message):
            second(x)
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            tf.function(second)(x)


class TestFromValueAndGradient:
    @WRAPS
    def test_one_call_serves_both(self, wrap):
        calls = []

        def engine(x):
            calls.append(1)
            return np.float64((x**2).sum()), 2 * x

        def fn(x):
            value, gradient = tf.numpy_function(engine, [x], [x.dtype, x.dtype])
            value.set_shape([])
            gradient.set_shape(x.shape)
            return value, gradient

        x = constant([1.0, 2.0])
        g = wrap(gradient)(sgtrick.from_value_and_gradient(fn), x)[0]
        np.testing.assert_array_equal(g, [2.0, 4.0])
        assert len(calls) == 1

    @WRAPS
    def test_aux_and_autodiff_of_the_rest(self, wrap):
        def fn(x, y):
            return (tf.stop_gradient(x) * y, {"twice": 2 * y}), 5.0

        h = sgtrick.from_value_and_gradient(fn, has_aux=True)
        x, y = constant(2.0), constant(3.0)
        by_x, by_y = wrap(gradient)(lambda x, y: h(x, y)[0], x, y)
        assert (by_x.numpy(), by_y.numpy()) == (5.0, 2.0)
        assert h(x, y)[1]["twice"].numpy() == 6.0

    @pytest.mark.parametrize(
        ("result", "has_aux", "message"),
        [
            ((1.0, lambda u: u), False, r"returned a function as the gradient.*custom_vjp"),
            (1.0, False, r"must return \(value, gradient\), got float"),
            ((1.0, 2.0), True, r"must return \(\(value, aux\), gradient\), got float"),
        ],
    )
    def test_misuse(self, result, has_aux, message):
        h = sgtrick.from_value_and_gradient(lambda x: result, has_aux=has_aux)
        with pytest.raises(TypeError, match=message):
            h(tf.constant(1.0))


class TestCustomJvp:
    @WRAPS
    def test_nested_outputs_and_arguments_without_derivatives(self, wrap):
        @sgtrick.custom_jvp
        def f(params, n):
            x = tf.stop_gradient(params["x"])
            return {"power": x**n, "count": tf.constant(n), "twice": [2 * x]}

        @f.defjvp
        def _(primals, tangents):
            (params, n), (t, t_n) = primals, tangents
            assert t_n is None
            out = {
                "power": n * params["x"] ** (n - 1) * t["x"],
                "count": None,
                "twice": [2 * t["x"]],
            }
            return f(params, n), out

        def run(x):
            out = f({"x": x}, 3)
            assert out["count"].dtype == tf.int32
            return out["power"] + 10 * out["twice"][0]

        assert wrap(gradient)(run, constant(2.0))[0].numpy() == 3 * 4 + 20

    @WRAPS
    @pytest.mark.parametrize("nondiff_argnums", [1, -2, "g", ["g"]])
    def test_nondiff_argnums_come_first(self, wrap, nondiff_argnums):
        h = sgtrick.custom_jvp(
            lambda x, g, y: g(tf.stop_gradient(x)) * y, nondiff_argnums=nondiff_argnums
        )

        @h.defjvp
        def _(g, primals, tangents):
            (x, y), (t, s) = primals, tangents
            return g(x) * y, 5 * t + 7 * s

        g = wrap(gradient)(lambda x, y: h(x, tf.square, y), constant(2.0), constant(3.0))
        assert [t.numpy() for t in g] == [5.0, 7.0]

    def test_a_missing_rule(self):
        @sgtrick.custom_jvp
        def f(x):
            return x

        with pytest.raises(
            TypeError, match=r"f has no JVP rule.*@f\.defjvp.*\(primal_out, tangent_out\)"
        ):
            f(1.0)

    @pytest.mark.parametrize(
        ("rule", "error", "message"),
        [
            (lambda p, t: t[0], TypeError, r"must return \(primal_out, tangent_out\), got \w*Tensor"),
            (lambda p, t: (p[0], [t[0], t[0]]), ValueError, r"tangent_out must have the structure of"),
            (lambda p, t: (p[0], t[0][:1]), ValueError, r"The tangent of .* has shape \[1\], the output \[2\]"),
            (lambda p, t: (p[0], tf.cast(t[0], tf.float32)), TypeError, r"dtype float32, the output float64"),
        ],
    )  # fmt: skip
    @WRAPS
    def test_bad_rules(self, wrap, rule, error, message):
        h = sgtrick.custom_jvp(lambda x: x)
        h.defjvp(rule)
        with pytest.raises(error, match=message):
            wrap(gradient)(h, constant([1.0, 2.0]))

    def test_misuse(self):
        h = sgtrick.custom_jvp(lambda x, *, k: x)
        h.defjvp(lambda p, t: (p[0], t[0]))
        with pytest.raises(TypeError, match=r"keyword-only arguments \['k'\]"):
            h(1.0, k=2.0)
        h = sgtrick.custom_jvp(lambda x: x, nondiff_argnums=3)
        h.defjvp(lambda p, t: (p[0], t[0]))
        with pytest.raises(
            ValueError, match=r"nondiff_argnums has 3, which is no argument of this call"
        ):
            h(1.0)
        with pytest.raises(
            TypeError, match=r"nondiff_argnums must be ints or parameter names, got 1\.5"
        ):
            sgtrick.custom_jvp(lambda x: x, nondiff_argnums=1.5)


def of_square(rest, rule):
    """Forms of `x**2 * rest(a)` by `x`, whose derivative by `a` is that of autodiff."""
    f = lambda x, a: tf.stop_gradient(x) ** 2 * rest(a)  # noqa: E731
    jvp = sgtrick.custom_jvp(f, nondiff_argnums=1)
    jvp.defjvp(lambda a, p, t: (None, rule(*p, a) * t[0]))
    fused = sgtrick.from_value_and_gradient(lambda x, a: (f(x, a), rule(x, a)))
    made = sgtrick.with_gradient(f, rule), fused, jvp
    return dict(zip(FORMS, made, strict=True))


@WRAPS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_arguments(kind, form, wrap):
    """Their components keep autodiff; a mixed derivative is right or refused."""
    values = constant([1.0, 2.0, 3.0])
    make = {
        "ragged": lambda v: tf.RaggedTensor.from_row_lengths(v, [1, 2]),
        "sparse": lambda v: tf.SparseTensor([[0, 0], [1, 0], [1, 1]], v, [2, 2]),
    }[kind]
    rest = lambda a: tf.reduce_sum(a.values**2)  # noqa: E731
    h = of_square(rest, lambda x, a: 2 * x * rest(a))[form]
    run = lambda x, v: h(x, make(v))  # noqa: E731
    x = constant(3.0)
    by_x, by_values = wrap(gradient)(run, x, values)
    np.testing.assert_allclose(by_x, 2 * 3 * 14)
    np.testing.assert_allclose(by_values, 9 * 2 * values)

    def mixed(first, second):
        def run_twice(x, v):
            with tf.GradientTape() as tape:
                tape.watch([x, v])
                g = tf.reduce_sum(gradient(run, x, v)[first])
            return tape.gradient(g, [x, v][second])

        return wrap(run_twice)(x, values)

    np.testing.assert_allclose(mixed(0, 1), 2 * 3 * 2 * values)
    try:
        found = mixed(1, 0)
    except (LookupError, tf.errors.InvalidArgumentError) as error:
        assert "mixed derivative" in str(error)  # noqa: PT017
    else:
        np.testing.assert_allclose(found, 2 * 3 * 2 * 6)


def by_vjp(f, rule):
    return sgtrick.custom_vjp(lambda x: (f(x), lambda u: u * rule(x)))


@pytest.mark.parametrize("make", [by_vjp, by_jvp, sgtrick.with_gradient])
def test_a_form_of_a_form_is_a_form_of_its_own(make):
    @sgtrick.with_gradient(grad=lambda x: 3.0)
    def inner(x):
        return x

    inner.mark = "inner"
    form = make(inner, lambda x: 5.0)
    if make is not by_vjp:
        assert form.__name__ == "inner"
    assert not hasattr(form, "mark")
    x = tf.constant(2.0)
    assert gradient(form, x)[0].numpy() == 5.0
    assert gradient(inner, x)[0].numpy() == 3.0


@pytest.mark.parametrize("make", [by_vjp, by_jvp, sgtrick.with_gradient])
def test_the_static_value_of_an_argument_is_known(make):
    """As to functions that check their arguments where they are traced."""
    known = []

    def f(x):
        known.append(tf.get_static_value(x))
        return x * 1

    form, outside = make(f, f), tf.constant(2.0)
    assert tf.function(lambda: gradient(form, outside)[0])() == 2
    assert tf.function(lambda: gradient(form, tf.constant(2.0))[0])() == 2
    assert len(known) >= 4
    assert all(value == 2 for value in known)
