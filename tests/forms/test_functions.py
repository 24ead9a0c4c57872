"""The contracts of `with_gradient`, `from_value_and_gradient` and `custom_jvp`"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import OF_SLOPE, tangent_form
from matrix import functions as fn
from matrix import spread
from shared import (
    EXECUTED,
    FIRST_WAYS,
    WAYS,
    WRAPS,
    constant,
    derivative,
    forward_derivative,
    gradients,
    mapped,
    with_jvp,
)

MODES = pytest.mark.parametrize("derivative", [derivative, forward_derivative])


class TestWithGradient:
    @WRAPS
    def test_a_rule_that_is_given_later(self, wrap):
        h = sgtrick.with_gradient(fn.misled(fn.scalar))
        h.defgrad(fn.scalar_gradient)
        x = constant([1.0, 2.0, 3.0])
        np.testing.assert_allclose(wrap(derivative(h))(x), fn.scalar_gradient(x))

    @WRAPS
    @pytest.mark.parametrize("argnums", ["x", 1, -1, np.int64(1), ("x",), [1], range(1, 2)])
    def test_the_others_keep_autodiff(self, wrap, argnums):
        """Arguments as well as variables that are read."""
        v, k = tf.Variable(2.0, dtype=tf.float64), keras.Variable(17.0, dtype="float64")
        g = (constant(7.0),) if tf.nest.is_nested(argnums) else constant(7.0)
        h = sgtrick.with_gradient(
            lambda a, x, *, b=5.0: a**2 * tf.stop_gradient(x) * b * v * k,
            lambda a, x, *, b: g,
            argnums=argnums,
        )
        a, x, b = constant(3.0), constant(11.0), constant(13.0)
        run = wrap(
            lambda *args: gradients(lambda a, x, b: h(a, x=x, b=b), *args, by=[*args, v, k.value])
        )
        y = 9 * 11 * 13 * 2 * 17
        assert h(a, x, b=b) == y
        np.testing.assert_allclose(run(a, x, b), [2 * y / 3, 7, y / 13, y / 2, y / 17])

    @WRAPS
    def test_structures_keywords_and_defaults(self, wrap):
        def f(params, scale=2.0, *, offset):
            return scale * tf.stop_gradient(params["a"] * params["b"][0]) + offset

        def grad(params, scale, *, offset):
            return {"a": constant(10.0) * scale, "b": [None, None]}

        h = sgtrick.with_gradient(f, grad, argnums="params")
        params = {"a": constant(3.0), "b": [constant(4.0), 7]}
        run = wrap(derivative(lambda a: h(params | {"a": a}, offset=constant(1.0))))
        assert run(params["a"]) == 20
        assert h(params, offset=1.0) == 25

    def test_any_number_of_arguments(self):
        def f(x, *args, **kwargs):
            return x * args[0] * args[1] * kwargs["k"]

        h = sgtrick.with_gradient(f, lambda *_, **__: (100.0, 200.0), argnums=("k", 2))
        xs = [constant(x) for x in (2.0, 3.0, 5.0, 7.0)]
        found = gradients(lambda x, y, z, k: h(x, y, z, k=k), *xs)
        np.testing.assert_allclose(found, [3 * 5 * 7, 2 * 5 * 7, 200, 100])

    def test_functions_without_a_signature(self):
        h = sgtrick.with_gradient(max, lambda a, b: 5.0)
        assert gradients(h, tf.constant(2.0), tf.constant(1.0))[0] == 5

    @WRAPS
    def test_infinite_gradients(self, wrap):
        # The derivative of 2 sqrt(x) is infinite at 0, and the one of that is too.
        h = sgtrick.with_gradient(lambda x: 2 * tf.sqrt(x), lambda x: tf.math.rsqrt(x))
        x = constant([0.0, 4.0])
        np.testing.assert_array_equal(h(x), [0.0, 4.0])
        np.testing.assert_allclose(wrap(derivative(h))(x), [np.inf, 0.5])

    @WRAPS
    @pytest.mark.parametrize("rule", ["plain", "assigning"])
    def test_variables_among_the_others_are_those_of_the_call(self, wrap, rule):
        v, one = (tf.Variable(c, dtype=tf.float64) for c in (5.0, 1.0))

        def f(x, v):
            y = x**2 * v * one
            if rule == "assigning":
                v.assign(7.0)
            return y

        h = sgtrick.with_gradient(f, lambda x, v: 2 * x * v)
        if rule == "assigning":
            h = sgtrick.with_gradient(lambda x, now: f(x, v) * now / 5, lambda x, now: 2 * x * now)

        def late(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = h(x, v)
            v.assign(100.0)
            return tape.gradient(y, x)

        assert wrap(late)(constant(1.0)) == 10


@pytest.mark.parametrize("name", [name for name in OF_SLOPE if name != "custom_vjp"])
def test_autograph_converts_the_functions_and_not_the_form(name):
    def f(x):
        return x**2 if tf.reduce_sum(x) > 0 else -(x**2)

    def slope(x):
        return 2 * x if tf.reduce_sum(x) > 0 else -2 * x

    h = OF_SLOPE[name](f, slope)
    for x in (constant([1.0, 2.0]), constant([-1.0, -2.0])):
        np.testing.assert_array_equal(derivative(tf.function(h))(x), slope(x))


@pytest.mark.parametrize("name", ["with_gradient", "custom_jvp", "custom_vjp"])
def test_a_rule_that_forward_mode_cannot_trace(name):
    """Eager reverse mode runs it as it is."""

    def slope(x):
        return 2 * x if x > 0 else 0 * x

    form, x = OF_SLOPE[name](lambda x: x**2, slope), constant(3.0)
    assert derivative(form)(x).numpy() == 6
    with pytest.raises(NotImplementedError, match=r"Forward mode traces the rule of .* tf\.cond"):
        forward_derivative(form)(x)


def calls_its_function(make):
    h = make(fn.misled(tf.exp), lambda x: h(x))
    return h


def differentiates_another(make, n=2):
    """`x**n`, by the product rule."""
    if n == 0:
        return make(lambda x: x**0, lambda x: 0 * x)
    lower = differentiates_another(make, n - 1)

    def slope(x):
        return lower(x) + x * derivative(lower)(x)

    return make(lambda x: x * lower(x), slope)


# A function that makes a form of a function and its slope, the true one, and through which order.
MADE = {
    "calls its function": (calls_its_function, tf.exp, 3),
    "differentiates another": (differentiates_another, lambda x: x**2, 2),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrap", "make", "made"),
    spread(EXECUTED, [sgtrick.with_gradient, tangent_form], MADE, together=1),
)
def test_derivatives_of_every_order(wrap, make, made):
    """They are those of the rule, against autodiff of the true function."""
    made_by, true, orders = MADE[made]
    x, h = constant(0.7), made_by(make)
    for _ in range(1 + orders):
        np.testing.assert_allclose(EXECUTED[wrap](h)(x), true(x), rtol=1e-12)
        h, true = derivative(h), derivative(true)


def of_scale_and_power(x, a=1.0, b=2.0):
    return a * tf.stop_gradient(x**b)


# Functions with defaults, and rules. TensorFlow's functions end in `name=None`.
DEFAULTS = {
    "name of an operation": (tf.sin, lambda x: tf.cos(x), tf.cos),
    "name of both": (tf.sin, tf.cos, tf.cos),
    "name of the rule alone": (lambda x, k=50.0: tf.minimum(x, k), tf.sigmoid, tf.sigmoid),
    "none": (lambda x, k=2: tf.stop_gradient(x**k), lambda x: 2 * x, lambda x: 2 * x),
    "by position": (lambda x, k=3: x + k, lambda x, factor: factor * x, lambda x: 3 * x),
    "rest": (lambda x, k=3: x + k, lambda *args: args[1] * args[0], lambda x: 3 * x),
    "the second": (of_scale_and_power, lambda x, b: b * x, lambda x: 2 * x),
    "keywords": (of_scale_and_power, lambda x, **k: k["a"] * k["b"] * x, lambda x: 2 * x),
    "keyword": (lambda x, *, k=2, m=3: x + k * m, lambda x, *, m: m * x, lambda x: 3 * x),
    "structure": (lambda x, k=((1, "a"), 2.0): x, lambda x: 2 * x, lambda x: 2 * x),
}
PASSED = {
    "an argument": (lambda x, k=2: x**k, lambda x: 2 * x, (3,), "default .none"),
    "zero of another sign": (lambda x, k=0.0: x**k, lambda x: 2 * x, (-0.0,), "default .none"),
    "an equal number of another type": (lambda x, k=2: x, lambda x: x, (2.0,), "default .none"),
    "in the place of another": (of_scale_and_power, lambda x, b: x, (5.0,), r"for a.*default .b\)"),
    "after a default": (of_scale_and_power, lambda x, b: x, (1.0, 3.0), r"too many.*default .a\)"),
}


class TestDefaults:
    """A rule is not called with those that it cannot take."""

    @WRAPS
    @pytest.mark.parametrize(("f", "grad", "expected"), DEFAULTS.values(), ids=DEFAULTS)
    def test_that_a_rule_leaves_out(self, f, grad, expected, wrap):
        """Also where `tf.function` passes the defaults of what it calls."""
        x, h = tf.constant([0.3, 0.8], tf.float64), sgtrick.with_gradient(f, grad)
        np.testing.assert_array_equal(h(x), f(x))
        for run in (wrap(derivative(h)), derivative(wrap(h))):
            np.testing.assert_allclose(run(x), expected(x), rtol=1e-12)

    @WRAPS
    @pytest.mark.parametrize(("f", "grad", "args", "message"), PASSED.values(), ids=PASSED)
    def test_what_has_another_value_is_not_left_out(self, f, grad, args, message, wrap):
        h = sgtrick.with_gradient(f, grad)
        message = f"(?s)gradient function of .* cannot take them.*{message}"
        with pytest.raises(TypeError, match=message):
            wrap(derivative(lambda x: h(x, *args)))(tf.constant([0.3, 0.8]))

    @WRAPS
    def test_that_have_derivatives_keep_them(self, wrap):
        def run(x, w):
            h = sgtrick.with_gradient(lambda x, w=w: tf.stop_gradient(x) * w, lambda x: tf.exp(x))
            return gradients(lambda x, w: h(x), x, w)

        x, w = tf.constant([0.3, 0.8]), tf.constant([2.0, 3.0])
        np.testing.assert_allclose(wrap(run)(x, w), [np.exp(x), x], rtol=1e-6)

    @WRAPS
    def test_are_primals(self, wrap):
        """As in JAX, unless they are `nondiff_argnums`."""
        h = with_jvp(lambda name, xs, ts: (name, ts[0] * tf.cos(xs[0])), tf.sin, nondiff_argnums=1)
        x = tf.constant([0.3, 0.8])
        np.testing.assert_allclose(derivative(wrap(h))(x), tf.cos(x))


class TestFromValueAndGradient:
    @WRAPS
    def test_one_call_of_the_host_serves_both(self, wrap):
        calls = []

        def engine(x):
            calls.append(1)
            return x**2, 2 * x

        def fused(x):
            both = tf.numpy_function(engine, [x], [x.dtype, x.dtype])
            return [tf.ensure_shape(t, x.shape) for t in both]

        run = wrap(derivative(sgtrick.from_value_and_gradient(fused)))
        np.testing.assert_array_equal(run(constant([1.0, 2.0])), [2.0, 4.0])
        assert len(calls) == 1


class TestCustomJvp:
    """As JAX documents it, with None in the place of its float0."""

    @WRAPS
    @MODES
    def test_nested_outputs_and_what_has_no_derivatives(self, wrap, derivative):
        @sgtrick.custom_jvp
        def f(params, n):
            x = tf.stop_gradient(params["x"])
            return {"power": x**n, "count": tf.constant(n), "twice": [2 * x]}

        @f.defjvp
        def _(primals, tangents):
            (params, n), (t, t_n) = primals, tangents
            assert t_n is None
            power = n * params["x"] ** (n - 1) * t["x"]
            return f(params, n), {"power": power, "count": None, "twice": [2 * t["x"]]}

        def run(x):
            out = f({"x": x}, 3)
            assert out["count"].dtype == tf.int32
            return out["power"] + 10 * out["twice"][0]

        assert wrap(derivative(run))(constant(2.0)) == 3 * 4 + 20

    @WRAPS
    @pytest.mark.parametrize("args", [(), (7,), (True, "text")], ids=["none", "int", "no number"])
    def test_nothing_to_differentiate(self, wrap, args):
        def rule(primals, tangents):
            raise AssertionError("called")

        f = with_jvp(rule, lambda *args: tf.constant(float(len(args))))
        assert wrap(derivative(lambda x: f(*args) + x))(tf.constant(1.0)) == 1

    @WRAPS
    def test_a_tangent_that_nobody_gave_is_zero(self, wrap):
        def rule(primals, tangents):
            assert [t.shape for t in tangents] == [p.shape for p in primals]
            return None, 2 * tangents[0] + 3 * tf.reduce_sum(tangents[1])

        f = with_jvp(rule, lambda x, y: x + tf.reduce_sum(y))
        run = wrap(forward_derivative(lambda x: f(x, constant([1.0, 2.0]))))
        assert run(constant(1.0)) == 2

    WAYS = {
        "eager": WAYS["eager"],
        "around vectorized_map": WAYS["around vectorized_map"],
        "forward": FIRST_WAYS["forward"],
    }

    @WRAPS
    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_a_rule_without_one_of_the_tangents(self, wrap, way):
        f = with_jvp(lambda p, t: (None, p[1] * t[0]), lambda x, y: x * y)
        x, y = constant([2.0, 3.0]), constant([5.0, 7.0])
        np.testing.assert_array_equal(wrap(way(f))(x, y), [5, 7])
        by_y = way(f, k=1)(x, y)
        assert by_y is None or not np.any(by_y)

    @pytest.mark.long
    @MODES
    def test_a_linear_rule_that_calls_its_function(self, derivative):
        """On primals and tangents."""
        double = with_jvp(lambda p, t: (double(*p), double(*t)), lambda x: 2 * x)
        in_branch = lambda x: tf.cond(x[0] > 0, lambda: derivative(double)(x), lambda: x)  # noqa: E731
        for run in (derivative(double), tf.function(in_branch), derivative(mapped(double))):
            np.testing.assert_array_equal(run(constant([1.0, 2.0])), [2, 2])

    @WRAPS
    @pytest.mark.parametrize("nondiff_argnums", [1, -2, "g", ["g"]])
    def test_nondiff_argnums_come_first(self, wrap, nondiff_argnums):
        h = sgtrick.custom_jvp(
            lambda x, g, y: g(tf.stop_gradient(x)) * y, nondiff_argnums=nondiff_argnums
        )
        h.defjvp(lambda g, p, t: (g(p[0]) * p[1], 5 * t[0] + 7 * t[1]))
        found = gradients(wrap(lambda x, y: h(x, tf.square, y)), constant(2.0), constant(3.0))
        assert found == (5, 7)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("as_rule", "way", "depth"),
        spread(
            EXECUTED,
            FIRST_WAYS,
            [1, 2],
            together=1,
            valid=lambda as_rule, way, depth: (  # TensorFlow takes long to trace the others
                as_rule == "eager" or (depth == 1 and way != "forward around tf.function")
            ),
        ),
    )
    def test_within_itself_for_another_function(self, as_rule, way, depth):
        """As quadratures and roots are, whose own derivatives are no use."""

        @sgtrick.custom_jvp(nondiff_argnums="g")
        def at(x, g):
            return tf.stop_gradient(g(x))

        @at.defjvp
        @EXECUTED[as_rule]
        def _(g, p, t):
            return None, derivative(g)(p[0]) * t[0]

        x = constant([0.5, 1.2])
        f = lambda a: a * at(a, tf.sin)  # noqa: E731
        for _ in range(depth):
            f = lambda x, f=f: at(x, f)  # noqa: E731
        np.testing.assert_allclose(FIRST_WAYS[way](f)(x), tf.sin(x) + x * tf.cos(x), rtol=1e-12)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("first", "as_rule", "way"), spread([True, False], EXECUTED, FIRST_WAYS, together=1)
    )
    def test_a_recurrence_over_an_argument_without_derivatives(self, first, as_rule, way):
        """A rule that calls its function for other integers, without end."""

        def exponential(n, x):  # exp(n x), whose derivative is n exp((n + 1) x) / exp(x)
            return tf.stop_gradient(tf.exp(n * x))

        f = exponential if first else lambda x, n: exponential(n, x)
        h = sgtrick.custom_jvp(f, nondiff_argnums=0 if first else 1)

        @h.defjvp
        @EXECUTED[as_rule]
        def _(n, p, t):
            more = h(n + 1, p[0]) if first else h(p[0], n + 1)
            return None, n * more * tf.exp(-p[0]) * t[0]

        x = constant([0.5, 1.2])
        found = FIRST_WAYS[way](lambda x: h(3, x) if first else h(x, 3))(x)
        np.testing.assert_allclose(found, 3 * np.exp(3 * x.numpy()), rtol=1e-12)


def identity(x):
    return x


def gradient_form(rule, f=identity, **options):
    return sgtrick.with_gradient(f, rule, **options)


def fused_form(result, **options):
    return sgtrick.from_value_and_gradient(lambda x: result, **options)


def pushed(p, t):
    return p[0], t[0]


def of_any_number(x, *args, **kwargs):
    return x * args[0] * kwargs["k"]


# Of calls with x = [1., 2.].
MISUSE = [
    (lambda x: sgtrick.with_gradient(identity)(x), TypeError, r"identity has no gradient function.*@identity\.defgrad"),
    (lambda x: gradient_form(identity, argnums=1.5)(x), TypeError, r"ints or parameter names, got 1\.5"),
    (lambda x: gradient_form(identity, argnums="y")(x), ValueError, r"argnums has 'y'.*one of the names \['x'\]"),
    (lambda x: gradient_form(identity, argnums=1)(x), ValueError, r"argnums has 1, .* a position: from -1 to 0\."),
    (lambda x: gradient_form(identity, argnums=(0, "x"))(x), ValueError, r"argnums=\(0, 'x'\) names an argument of identity twice"),
    (lambda x: gradient_form(identity, of_any_number, argnums=(0, "args"))(x, x, x, k=x), ValueError, r"argnums has 'args', which is no argument .*'args\[1\]', 'k'\], or .* -3 to 2\."),
    (lambda x: gradient_form(identity, lambda x: (x, x))(x), TypeError, r"<lambda> must return one tensor, got a tuple of 2\..*custom_jvp"),
    (lambda x: gradient_form(identity, lambda x, y: x)(x), TypeError, r"<lambda>\(\) missing a required argument: 'y'"),
    (lambda x: gradient_form(3.0)(x), TypeError, r"grad must be a function, got float\."),
    (lambda x: gradient_form(identity, "f")(x), TypeError, r"f must be a function, got str\."),
    (lambda x: gradient_form(identity, lambda x: tf.constant(1))(x), TypeError, r"<lambda> returned dtype int32, which has no derivatives"),
    (lambda x: gradient_form(lambda x: tf.ones([3]))(x), ValueError, r"the value \[2\], the gradient with respect to x \[3\] and x \[2\] do not fit"),
    (lambda x: gradient_form(lambda x, u: 2 * x * u)(x), TypeError, r"called with the same arguments, x, but cannot take them: missing a required argument: 'u'.* upstream gradient is one of custom_vjp"),
    (lambda x: gradient_form(lambda x: None)(x), ValueError, r"grad of identity returned None instead of a gradient: did you forget to return it\?"),
    (lambda x: gradient_form(lambda x: [x, x])(x), ValueError, r"the gradient with respect to x must have the structure of x"),
    (lambda x: gradient_form(identity, argnums=(0,))(x), ValueError, r"tuple of 1 gradients, one for each of argnums=\(0,\), got \w*Tensor"),
    (lambda x: gradient_form(lambda x: "a")(x), TypeError, r"the gradient with respect to x has dtype string"),
    (lambda x: gradient_form(lambda x, n: (1.0, 1.0), lambda x, n: x[0] * n, argnums=(0, 1))(x, 3), TypeError, r"n has no derivatives, but the gradient with respect to n is not None"),
    (lambda x: gradient_form(identity)(object()), TypeError, r"no derivative of identity with respect to x: object\. Pass tensors.*or select other arguments"),
    (lambda x: fused_form((1.0, lambda u: u))(x), TypeError, r"returned a function as the gradient.*custom_vjp"),
    (lambda x: fused_form(1.0)(x), TypeError, r"must return \(value, gradient\), got float"),
    (lambda x: fused_form((1.0, 2.0), has_aux=True)(x), TypeError, r"must return \(\(value, aux\), gradient\), got float"),
    (lambda x: sgtrick.custom_jvp(identity)(x), TypeError, r"identity has no JVP rule.*@identity\.defjvp.*\(primal_out, tangent_out\)"),
    (lambda x: sgtrick.custom_vjp(lambda x: (None, lambda *u: u[0]))(x), TypeError, r"<lambda> returned None as its value"),
    (lambda x: with_jvp(pushed, lambda x: None)(x), TypeError, r"<lambda> returned None instead of a value"),
    (lambda x: with_jvp(lambda p, t: t[0])(x), TypeError, r"must return \(primal_out, tangent_out\), got \w*Tensor"),
    (lambda x: with_jvp(lambda p, t: (p[0], [t[0], t[0]]))(x), ValueError, r"tangent_out must have the structure of"),
    (lambda x: with_jvp(lambda p, t: (p[0], t[0][:1]))(x), ValueError, r"The tangent of .* has shape \[1\], the output \[2\]"),
    (lambda x: with_jvp(lambda p, t: (p[0], tf.cast(t[0], tf.float32)))(x), TypeError, r"dtype float32, the output float64"),
    (lambda x: with_jvp(pushed, lambda x, *, k: x)(x, k=2.0), TypeError, r"rule of <lambda> cannot take the keyword-only argument 'k'"),
    (lambda x: with_jvp(pushed, nondiff_argnums=3)(x), ValueError, r"nondiff_argnums has 3, which is no argument of this call"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wrap", "call", "error", "message"),
    [(wrap, *m) for m, wrap in zip(MISUSE, itertools.cycle(EXECUTED.values()))],
    ids=[m[2] for m in MISUSE],
)
def test_misuse(wrap, call, error, message):
    with pytest.raises(error, match=message):
        wrap(derivative(call))(constant([1.0, 2.0]))


@pytest.mark.parametrize("name", ["with_gradient", "custom_jvp", "custom_vjp"])
class TestForms:
    def test_of_a_form_is_a_form_of_its_own(self, name):
        @sgtrick.with_gradient(grad=lambda x: 3.0)
        def inner(x):
            return x

        inner.mark = "inner"
        form = OF_SLOPE[name](inner, lambda x: 5.0)
        if name != "custom_vjp":
            assert form.__name__ == "inner"
        assert not hasattr(form, "mark")
        x = tf.constant(2.0)
        assert (derivative(form)(x), derivative(inner)(x)) == (5, 3)

    def test_the_static_value_of_an_argument_is_known(self, name):
        """As to functions that check their arguments where they are traced."""
        known = []

        def f(x):
            known.append(tf.get_static_value(x))
            return x * 1

        run, outside = derivative(OF_SLOPE[name](f, f)), tf.constant(2.0)
        assert tf.function(lambda: run(outside))() == 2
        assert tf.function(lambda: run(tf.constant(2.0)))() == 2
        assert len(known) >= 4
        assert all(value == 2 for value in known)
