"""`custom_vjp`: the protocol of `tf.custom_gradient`, held where TensorFlow drops overrides."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from matrix import Case, judge, pairs, promised
from matrix import functions as fn
from matrix.values import MATRICES, NUMBERS, POINTS
from sgtrick import custom_vjp

tfd = tfp.distributions
X = tf.constant([0.3, 0.7, 1.1], tf.float64)


@custom_vjp
def scalar(x):
    def grad_fn(u):
        return tf.expand_dims(u, -1) * fn.scalar_gradient(x)

    return fn.misled(fn.scalar)(x), grad_fn


@custom_vjp
def elementwise(x):
    return fn.misled(fn.elementwise)(x), lambda u: u * fn.elementwise_gradient(x)


@custom_vjp
def vector(x):
    def grad_fn(u):
        return tf.reduce_sum(tf.expand_dims(u, -1) * fn.vector_jacobian(x), -2)

    return fn.misled(fn.vector)(x), grad_fn


@custom_vjp
def two(x, y):
    def grad_fn(u):
        gx, gy = fn.two_gradients(x, y)
        return u[..., tf.newaxis, tf.newaxis] * gx, u * gy

    return fn.misled(fn.two)(x, y), grad_fn


CASES = [
    Case("scalar", fn.scalar, scalar, (POINTS,), batched=False, order=2),
    Case("chains", fn.scalar, scalar, (POINTS,), order=2),
    Case("elementwise", fn.elementwise, elementwise, (NUMBERS,), order=2),
    Case("vector", fn.vector, vector, (POINTS,), order=2),
    Case("two arguments", fn.two, two, (MATRICES, NUMBERS), order=2),
    Case("two, by keyword", fn.two, lambda x, y: two(y=y, x=x), (MATRICES, NUMBERS), order=2),
]


PAIRS = pairs(CASES, everywhere={"two arguments"})


@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_matrix(case, cell):
    """Second derivatives included, in every cell."""
    assert judge(cell, case) in promised(cell, case)


def vjp(h, x, upstream=None, **options):
    with tf.GradientTape(**options) as tape:
        tape.watch(x)
        y = h(x)
    return tape.gradient(y, x, upstream)


def jvp(h, x):
    with tf.autodiff.ForwardAccumulator(x, tf.nest.map_structure(tf.ones_like, x)) as accumulator:
        y = h(x)
    return accumulator.jvp(y)


def derivative(h, order, differentiate=vjp):
    for _ in range(order):
        h = (lambda inner: lambda x: differentiate(inner, x))(h)
    return h


def in_function(f):
    return tf.function(f)


def in_xla(f):
    return tf.function(f, jit_compile=True)


HONOURED = [lambda f: f, in_function, in_xla]
HONOURED_IDS = ["eager", "tf.function", "XLA"]
honoured = pytest.mark.parametrize("wrap", HONOURED, ids=HONOURED_IDS)


def of_map(f, x):
    return vjp(lambda x: tf.vectorized_map(f, x), x)


DIFFERENTIATED = {
    "eager": vjp,
    "in tf.function": lambda f, x: tf.function(vjp)(f, x),
    "around tf.function": lambda f, x: vjp(tf.function(f), x),
    "XLA": lambda f, x: tf.function(vjp, jit_compile=True)(f, x),
    "vectorized_map": of_map,
    "vectorized_map in tf.function": lambda f, x: tf.function(of_map)(f, x),
    "forward": jvp,
    "forward in tf.function": lambda f, x: tf.function(jvp)(f, x),
    "forward around tf.function": lambda f, x: jvp(tf.function(f), x),
}
anyhow = pytest.mark.parametrize("differentiate", DIFFERENTIATED.values(), ids=DIFFERENTIATED)


@custom_vjp
def log1pexp(x):
    e = tf.exp(x)
    return tf.math.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))


@anyhow
def test_log1pexp(differentiate):
    x = tf.constant([1.0, 2.0, 100.0])
    np.testing.assert_allclose(differentiate(log1pexp, x), [0.7310586, 0.8807971, 1.0], 1e-6)


@anyhow
def test_two_partials(differentiate):
    @custom_vjp
    def bar(x, y):
        # The documented forward is x * y, whose own derivative is right already.
        return tf.stop_gradient(x * y), lambda upstream: (upstream * y, upstream * x)

    x = tf.constant([2.0, 5.0])
    np.testing.assert_allclose(differentiate(lambda x: bar(x, 3.0), x), [3.0, 3.0])
    np.testing.assert_allclose(differentiate(lambda y: bar(2.0, y), x), [2.0, 2.0])
    np.testing.assert_allclose(differentiate(lambda x: bar(x, x), x), [4.0, 10.0])


@honoured
def test_a_rule_for_a_variable(wrap):
    weights = tf.Variable(tf.ones([2]))

    @custom_vjp
    def linear_poly(x):
        def grad_fn(dpoly, variables):
            assert len(variables) == 1
            assert variables[0] is weights
            dy_dw = dpoly * tf.stack([x**1, x**0])
            return dpoly * weights[1], [tf.reduce_sum(tf.reshape(dy_dw, [2, -1]), axis=1)]

        return weights[1] * x + weights[0], grad_fn

    x = tf.constant([1.0, 2.0, 3.0])

    def run(x, h=linear_poly):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x)
        return y, *tape.gradient(y, [x, weights])

    for came in (
        wrap(run)(x),
        wrap(lambda x: run(x, lambda x: tf.vectorized_map(linear_poly, x)))(x),
    ):
        for a, b in zip(came, ([2.0, 3.0, 4.0], [1.0, 1.0, 1.0], [6.0, 3.0]), strict=True):
            np.testing.assert_allclose(tf.convert_to_tensor(a), b)


@honoured
@pytest.mark.parametrize("inner", [tf.custom_gradient, custom_vjp], ids=["tf", "sgtrick"])
def test_a_rule_in_a_rule(inner, wrap):
    """A sine whose second derivative has its own rule."""

    @custom_vjp
    def op(x):
        def first_order(dy):
            @inner
            def first_order_custom(unused_x):
                return tf.cos(x), lambda ddy: -ddy * tf.sin(x)

            return dy * first_order_custom(x)

        return tf.stop_gradient(tf.sin(x)), first_order

    np.testing.assert_allclose(wrap(lambda x: vjp(op, x))(X), np.cos(X))
    np.testing.assert_allclose(wrap(derivative(op, 2))(X), -np.sin(X))
    np.testing.assert_allclose(of_map(op, X), np.cos(X))


def sine(x):
    return tf.stop_gradient(tf.sin(x)), lambda u: u * cosine(x)


def cosine(x):
    return tf.stop_gradient(tf.cos(x)), lambda u: -u * sine(x)


sine, cosine = custom_vjp(sine), custom_vjp(cosine)


@honoured
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_rules_that_call_each_other(order, wrap):
    expected = [np.sin, np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x)][order % 4](X)
    np.testing.assert_allclose(wrap(derivative(sine, order))(X), expected)
    np.testing.assert_allclose(derivative(wrap(sine), order)(X), expected)


MODES = [(vjp, vjp), (vjp, jvp), (jvp, vjp), (jvp, jvp)]


@honoured
@pytest.mark.parametrize(("inner", "outer"), MODES)
def test_second_derivatives_by_both_modes(inner, outer, wrap):
    def second(x):
        return outer(lambda x: inner(lambda x: log1pexp(x), x), x)

    s = 1 / (1 + np.exp(-X))
    np.testing.assert_allclose(wrap(second)(X), s * (1 - s), 1e-12)


@honoured
def test_second_derivatives_of_a_map(wrap):
    s = 1 / (1 + np.exp(-X))
    second = wrap(lambda x: vjp(lambda x: of_map(log1pexp, x), x))
    np.testing.assert_allclose(second(X), s * (1 - s), 1e-12)


@pytest.mark.parametrize("wrap", HONOURED[:2], ids=HONOURED_IDS[:2])
def test_grad_fn_is_lazy_and_f_called_once(wrap):
    called = []

    @custom_vjp
    def h(x):
        called.append("f")

        def grad_fn(u):
            tf.py_function(lambda: called.append("grad_fn"), [], [])
            return u * 2

        return x * 2, grad_fn

    wrap(h)(X)
    assert called.count("f") == 1
    if wrap is HONOURED[0]:
        assert called == ["f"]
    called.clear()
    vjp(h, X)
    assert called == ["f", "grad_fn"]


def test_no_retracing():
    traces = []

    @tf.function
    def f(x):
        traces.append(x)
        return vjp(log1pexp, x)

    for _ in range(3):
        f(X)
    assert len(traces) == 1


@custom_vjp
def hosted(x):
    y, c = (tf.numpy_function(g, [x], x.dtype) for g in (np.sin, np.cos))
    y.set_shape(x.shape)

    def grad_fn(u):
        g = tf.numpy_function(np.multiply, [u, c], x.dtype)
        g.set_shape(x.shape)
        return g

    return y, grad_fn


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("wrap", HONOURED[:2], ids=HONOURED_IDS[:2])
def test_host_calls_in_reverse_mode(wrap, persistent):
    run = wrap(lambda x: vjp(hosted, x, persistent=persistent))
    np.testing.assert_allclose(run(X), np.cos(X))
    np.testing.assert_allclose(vjp(wrap(hosted), X, persistent=persistent), np.cos(X))
    np.testing.assert_allclose(tf.vectorized_map(lambda x: vjp(hosted, x), X), np.cos(X))


def test_host_calls_under_vectorized_map():
    np.testing.assert_allclose(of_map(hosted, X), np.cos(X))
    np.testing.assert_allclose(tf.function(of_map)(hosted, X), np.cos(X))


def test_host_calls_in_forward_mode():
    """Which has to transpose them."""
    for differentiate in (jvp, tf.function(jvp)):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"hosted.*is not the transpose.* a host call"
        ):
            differentiate(hosted, X)
    assert np.all(np.isnan(jvp(tf.function(hosted), X)))


@pytest.mark.autograph
@honoured
def test_errors_of_grad_fn_wait_for_a_gradient(wrap):
    @custom_vjp
    def h(x):
        def grad_fn(u):
            raise NotImplementedError("not yet")

        return x + 1, grad_fn

    np.testing.assert_allclose(wrap(h)(X), X + 1)
    with pytest.raises(Exception, match="not yet"):
        wrap(lambda x: vjp(h, x))(X)
    with pytest.raises(Exception, match="NotImplementedError: not yet"):
        wrap(lambda x: of_map(h, x))(X)


@honoured
def test_nothing_to_differentiate(wrap):
    whole = custom_vjp(lambda x: (tf.cast(x, tf.int32), lambda u: 1 / 0))
    assert wrap(whole)(X).dtype == tf.int32
    np.testing.assert_array_equal(wrap(whole)(tf.constant([1, 2])), [1, 2])


@pytest.mark.parametrize("wrap", HONOURED[:2], ids=HONOURED_IDS[:2])
def test_py_function_is_not_run_by_the_forward(wrap):
    calls = []

    def double(u):
        calls.append(1)
        return 2 * u

    @custom_vjp
    def h(x):
        def grad_fn(u):
            g = tf.py_function(double, [u], u.dtype)
            g.set_shape(u.shape)
            return g

        return 2 * x, grad_fn

    wrap(h)(X)
    wrap(lambda x: tf.vectorized_map(h, x))(X)
    assert not calls
    np.testing.assert_allclose(wrap(vjp)(h, X), 2 * np.ones(3))
    assert len(calls) == 1
    np.testing.assert_allclose(wrap(of_map)(h, X), 2 * np.ones(3))


def test_a_host_call_with_a_transpose():
    """Which forward mode needs."""

    def times(x, c):
        y = tf.numpy_function(np.multiply, [x, c], x.dtype)
        y.set_shape(x.shape)
        return y

    @custom_vjp
    def h(x):
        @custom_vjp
        def pulled(u):
            return times(u, tf.cos(x)), lambda v: v * tf.cos(x)

        return tf.sin(x), pulled

    for differentiate in (vjp, of_map, jvp):
        np.testing.assert_allclose(differentiate(h, X), np.cos(X))
        np.testing.assert_allclose(tf.function(differentiate)(h, X), np.cos(X))


def test_rules_that_ignore_the_upstream():
    zero = custom_vjp(lambda x: (tf.sin(x), lambda u: tf.zeros_like(x)))
    np.testing.assert_array_equal(of_map(zero, X), 0 * X)
    none = custom_vjp(lambda x: (tf.sin(x), lambda u: None))
    assert tf.function(lambda x: [vjp(none, x)])(X) == [None]
    assert vjp(none, X) is None


def test_non_finite_coefficients_and_points():
    x = tf.constant([1000.0, np.inf, -np.inf, 2.0])
    np.testing.assert_array_equal(tf.vectorized_map(log1pexp, x), log1pexp(x))
    np.testing.assert_allclose(of_map(log1pexp, x), [1.0, 1.0, 0.0, 0.880797], 1e-5)
    bad = custom_vjp(lambda x: (x, lambda u: u * np.inf))
    np.testing.assert_array_equal(tf.function(bad)(X), X)
    np.testing.assert_array_equal(tf.function(vjp)(bad, X), np.full(3, np.inf))


@pytest.mark.parametrize("decorator", [tf.custom_gradient, custom_vjp], ids=["tf", "sgtrick"])
@honoured
def test_structures_of_outputs_and_inputs(decorator, wrap):
    @decorator
    def h(x, rest):
        def grad_fn(ua, ub, uc):
            return ua + uc, 2 * ub, 3 * uc

        return {"a": x, "b": (x * 2, [rest["p"] + rest["q"]])}, grad_fn

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            p, q = 5 * x, 7 * x
            y = h(x, {"q": q, "p": p})
            s = y["a"] + y["b"][1][0]
        return tape.gradient(s, [x, p, q])

    for a, b in zip(wrap(run)(X), ([23.0] * 3, [0.0] * 3, [3.0] * 3), strict=True):
        np.testing.assert_allclose(a, b)


def test_several_outputs_where_the_override_is_dropped():
    @custom_vjp
    def h(x, n, y):
        def grad_fn(ua, un, ub):
            return ua * 2 + ub * y, None, ub * x

        return (2 * x, n + 1, x * y), grad_fn

    def mapped(x):
        a, n, b = tf.vectorized_map(lambda x: h(x, tf.constant(3), x), x)
        assert n.dtype == tf.int32
        return a + b

    np.testing.assert_allclose(vjp(mapped, X), 2 + 2 * X)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex(name):
    x, c = tf.constant([1 + 2j, 3 - 1j], name), tf.constant(2 - 3j, name)
    h = custom_vjp(lambda x: (c * x, lambda u: u * tf.math.conj(c)))
    u = tf.constant([1 + 1j, 2j], name)
    expected = vjp(lambda x: c * x, x, u)
    np.testing.assert_allclose(vjp(h, x, u), expected)
    np.testing.assert_allclose(vjp(lambda x: tf.vectorized_map(h, x), x, u), expected)
    np.testing.assert_allclose(tf.function(vjp)(h, x, u), expected)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32])
def test_dtypes(dtype):
    x = tf.constant([0.5, 2.0], dtype)
    h = custom_vjp(lambda x: (tf.stop_gradient(x * x), lambda u: 2 * u * x))
    for differentiate in DIFFERENTIATED.values():
        g = differentiate(h, x)
        assert g.dtype == dtype
        np.testing.assert_array_equal(tf.cast(g, tf.float32), [1.0, 4.0])


@honoured
def test_a_joint_distribution_that_is_batched_automatically(wrap):
    @custom_vjp
    def kernel(x):
        return -tf.stop_gradient(x**2) / 2, lambda u: -u * x

    class Bell(tfd.Distribution):
        def __init__(self, loc):
            self.loc = loc
            super().__init__(loc.dtype, tfd.FULLY_REPARAMETERIZED, False, False)

        def _log_prob(self, x):
            return kernel(x - self.loc)

        def _event_shape(self):
            return tf.TensorShape([])

        def _batch_shape(self):
            return tf.TensorShape([])

        def _sample_n(self, n, seed=None):
            return tf.zeros([n], self.dtype)

    @tfd.JointDistributionCoroutineAutoBatched
    def model():
        a = yield tfd.Normal(tf.constant(0.0, tf.float64), 1.0)
        yield Bell(a)

    a, b = X, tf.constant([1.0, 2.0, 3.0], tf.float64)
    by_a, by_b = wrap(lambda ab: vjp(lambda ab: model.log_prob(*ab), ab))([a, b])
    np.testing.assert_allclose(by_a, b - 2 * a)
    np.testing.assert_allclose(by_b, a - b)


@honoured
def test_the_same_tensor_twice(wrap):
    h = custom_vjp(lambda x, y: (tf.stop_gradient(x * y), lambda u: (u * y, u * x)))
    np.testing.assert_allclose(wrap(lambda x: vjp(lambda x: h(x, x), x))(X), 2 * X)


@pytest.mark.parametrize("wrap", HONOURED[:2], ids=HONOURED_IDS[:2])
def test_ragged(wrap):
    @custom_vjp
    def h(r):
        return r * 2.0, lambda u: u * 3.0

    def run(values):
        with tf.GradientTape() as tape:
            tape.watch(values)
            r = tf.RaggedTensor.from_row_lengths(values, [1, 2])
            y = h(r)
            assert isinstance(y, tf.RaggedTensor)
            s = tf.reduce_sum(y * y)
        return tape.gradient(s, values)

    values = tf.constant([1.0, 2.0, 3.0])
    np.testing.assert_allclose(wrap(run)(values), 12 * values)


@pytest.mark.parametrize("wrap", HONOURED[:2], ids=HONOURED_IDS[:2])
def test_a_forward_without_registered_gradient(wrap):
    h = custom_vjp(lambda x: (tf.random.shuffle(x), lambda u: 2 * u))
    np.testing.assert_allclose(wrap(lambda x: vjp(h, x))(X), [2.0] * 3)
    np.testing.assert_allclose(vjp(wrap(h), X), [2.0] * 3)


VARIABLES = {"tf": tf.Variable, "keras": keras.Variable}


@honoured
@pytest.mark.parametrize("make", VARIABLES.values(), ids=VARIABLES)
def test_variables_that_are_arguments(make, wrap):
    """They are arguments, not variables that f read."""
    v = make([1.0, 2.0])
    h = custom_vjp(lambda v: (v * 2.0, lambda u: u * 3.0))

    def run():
        with tf.GradientTape() as tape:
            y = h(v)
        return tape.gradient(y, getattr(v, "_value", v))

    np.testing.assert_allclose(wrap(run)(), [3.0, 3.0])


@honoured
@pytest.mark.parametrize("make", VARIABLES.values(), ids=VARIABLES)
def test_the_rule_has_the_values_that_variables_had_at_the_call(make, wrap):
    """As native code; tf.custom_gradient does so in graphs, and in eager reads what came after."""
    h = custom_vjp(lambda x, v: (tf.stop_gradient(x * v), lambda u: (u * v, u * x)))
    v = make([2.0, 3.0])

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x, v)
        v.assign([20.0, 30.0])
        return tape.gradient(y, [x, getattr(v, "_value", v)])

    by_x, by_v = wrap(run)(tf.constant([5.0, 7.0]))
    np.testing.assert_array_equal(by_x, [2.0, 3.0])
    np.testing.assert_array_equal(by_v, [5.0, 7.0])


def test_a_variable_that_is_an_argument_is_not_one_that_f_read():
    """Even where `f` reads it itself too, as with `tf.custom_gradient`."""
    v = tf.Variable(2.0)
    h = custom_vjp(lambda x: (x * v, lambda u: u * 3))
    with tf.GradientTape() as tape:
        y = h(v)
    assert tape.gradient(y, v) == 3.0


@honoured
def test_variables_that_are_not_trainable(wrap):
    c = tf.Variable(2.0, trainable=False)
    h = custom_vjp(lambda x: (x * tf.cast(c, x.dtype), lambda u: u * 3))
    np.testing.assert_allclose(wrap(lambda x: vjp(h, x))(X), [3.0] * 3)


@pytest.mark.parametrize(
    ("mapped", "wrap"),
    # The fallback of vectorized_map for a gather of a variable has no XLA kernel.
    [*((False, wrap) for wrap in HONOURED), *((True, wrap) for wrap in HONOURED[:2])],
)
def test_a_sparse_variable_gradient(mapped, wrap):
    table = tf.Variable(tf.ones([4, 2]))

    @custom_vjp
    def lookup(i, x):
        def grad_fn(u, variables):
            flat = tf.reshape(u * x, [-1, 2])
            g = tf.IndexedSlices(flat, tf.reshape(i, [-1]), tf.constant([4, 2]))
            return (None, u * tf.gather(table, i)), [g]

        return tf.gather(table, i) * x, grad_fn

    i, x = tf.constant([2, 0, 2]), tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])

    def run(x):
        with tf.GradientTape() as tape:
            y = tf.vectorized_map(lambda ix: lookup(*ix), (i, x)) if mapped else lookup(i, x)
        return tf.convert_to_tensor(tape.gradient(y, table))

    np.testing.assert_allclose(wrap(run)(x), [[3, 4], [0, 0], [6, 8], [0, 0]])


def test_variables_made_by_the_first_call():
    made = []

    @custom_vjp
    def h(x):
        if not made:
            made.append(tf.Variable(2.0))
        return x * made[0], lambda u, variables: (u * made[0], [u * x])

    @tf.function
    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x)
        return tape.gradient(y, [x, *made])

    np.testing.assert_allclose(run(tf.constant(3.0)), [2.0, 3.0])


@honoured
def test_mixed_second_derivatives_of_variables(wrap):
    v = tf.Variable(2.0)
    h = custom_vjp(lambda x: (x**2 * v, lambda u, variables: (2 * u * x * v, [u * x**2])))

    def mixed(x, h=h):
        with tf.GradientTape() as outer:
            by_x = vjp(h, x)
        return outer.gradient(by_x, v)

    x = tf.constant(3.0)
    np.testing.assert_allclose(wrap(mixed)(x), 6.0)
    np.testing.assert_allclose(mixed(x, wrap(h)), 6.0)


class Scaled(tf.Module):
    def __init__(self):
        super().__init__()
        self.factor = 3.0

    @custom_vjp
    def __call__(self, x, *, power=1):
        """Documented."""
        return x, lambda u: (self.factor * u, None)

    @classmethod
    @custom_vjp
    def of_class(cls, x):
        return x, lambda u: 4.0 * u

    @staticmethod
    @custom_vjp()
    def static(x):
        return x, lambda u: 5.0 * u


@honoured
def test_methods(wrap):
    scaled = Scaled()
    x = tf.constant([1.0])
    for h, expected in ((scaled, 3), (scaled.of_class, 4), (Scaled.static, 5)):
        np.testing.assert_allclose(wrap(lambda x, h=h: vjp(h, x))(x), [expected])
    np.testing.assert_allclose(vjp(lambda x: scaled(x, power=2), x), [3.0])
    assert Scaled.__call__.__doc__ == "Documented."


@honoured
def test_keyword_arguments_get_gradients(wrap):
    h = custom_vjp(lambda x, y, *, z: (x + y + z, lambda u: (2 * u, 3 * u, 4 * u)))

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            parts = [x + 0, x + 0, x + 0]
            s = h(z=parts[2], y=parts[1], x=parts[0])
        return tape.gradient(s, parts)

    np.testing.assert_allclose(wrap(run)(X), np.outer([2, 3, 4], np.ones(3)))


@honoured
def test_the_order_of_keywords(wrap):
    declared = custom_vjp(lambda x, *, b, a: (x + a + b, lambda u: (u, 2 * u, 3 * u)))
    passed = custom_vjp(lambda x, **c: (x + sum(c.values()), lambda u: (u, 3 * u, 2 * u)))

    def run(x, h):
        with tf.GradientTape() as tape:
            tape.watch(x)
            parts = [x + 0, x + 0, x + 0]
            s = h(parts[0], a=parts[2], b=parts[1])
        return tape.gradient(s, parts)

    for h in (declared, passed):
        got = wrap(functools.partial(run, h=h))(X)
        np.testing.assert_allclose(got, np.outer([1, 2, 3], np.ones(3)))


def test_a_partial_as_an_attribute_of_a_class():
    class Model:
        triple = functools.partial(lambda k, x: (k * x, lambda u: 2 * k * u), 3.0)
        inside = custom_vjp(staticmethod(triple))
        outside = staticmethod(custom_vjp(triple))

    for h in (Model.inside, Model().inside, Model().outside):
        np.testing.assert_allclose(vjp(h, tf.constant([1.0])), [6.0])


def test_composition_with_tf_function_as_an_argument():
    """tf.function replaces what has `__wrapped__` by what is wrapped."""
    np.testing.assert_allclose(tf.function(vjp)(log1pexp, X), 1 / (1 + np.exp(-X)))


ERRORS = {
    "no pair": (lambda x: x, TypeError, r"must return \(y, grad_fn\)"),
    "too many": (
        lambda x: (x, lambda u: (u, u)),
        ValueError,
        "grad_fn of <lambda> returned 2 gradients, expected 1, one for each of: x\\.",
    ),
    "too few": (
        lambda x: (x, lambda u: []),
        ValueError,
        "returned 0 gradients, expected 1",
    ),
    "shape": (
        lambda x: (x, lambda u: u[:2]),
        ValueError,
        r"gradient of shape \[2\] for x, expected \[3\]",
    ),
}


@honoured
@pytest.mark.parametrize(("f", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_errors(f, error, match, wrap):
    with pytest.raises(error, match=match):
        wrap(lambda x: vjp(custom_vjp(f), x))(X)


@honoured
def test_errors_name_the_variables(wrap):
    v = tf.Variable(1.0, name="stiffness")
    rules = {
        r"reads the variables \['stiffness:0'\].*must take a keyword argument": lambda u: u,
        "returned 0 variable gradients, expected 1, one for each of": lambda u, variables: (u, []),
        r"must return \(gradients, variable_gradients\)": lambda u, variables: u,
        r"shape \[3\] for variable stiffness:0, expected \[\]": lambda u, variables: (u, [u]),
    }
    for match, rule in rules.items():
        h = custom_vjp(lambda x, rule=rule: (x * tf.cast(v, x.dtype), rule))
        with pytest.raises((TypeError, ValueError), match=match):
            wrap(lambda x, h=h: vjp(h, x))(X)
