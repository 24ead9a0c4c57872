"""Engines whose value is a number, an array or a structure, by each way to give the derivatives.

The oracles are autodiff of the same model in TensorFlow and, for finite differences, SciPy's steps.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from scipy.optimize._numdiff import approx_derivative

import sgtrick
from array_model import (
    GIVEN,
    MODELS,
    VECTORIZED,
    WAYS,
    A,
    U,
    W,
    X,
    by_forward_mode,
    found_in,
    gradients,
    jacobians,
    likelihood_gradient,
    true,
)
from matrix import spread
from shared import WRAPS, derivative, forward_derivative, mapped

ARRAY = MODELS["array"]
WITHIN = {"2-point": 1e-6, "3-point": 1e-8}  # else 1e-12
SCHEMES = pytest.mark.parametrize("scheme", WITHIN)
ALL_GIVEN = pytest.mark.parametrize("given", GIVEN)


def check(came, expected, given="", rtol=1e-12):
    rtol = WITHIN.get(given, rtol)
    for a, b in zip(came, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


LAWS = [gradients, jacobians, by_forward_mode, likelihood_gradient]


def is_slow(law, way):
    return law is by_forward_mode and way.startswith("around")


def is_valid(law, way, given, *_):
    if law is jacobians:  # of one point: there is nothing to map
        return way != "around vectorized_map"
    return not is_slow(law, way) or given in ("grad", "products")


CASES = spread(LAWS, WAYS, GIVEN, MODELS, [True, False], valid=is_valid)


@pytest.mark.parametrize(
    ("law", "way", "given", "name", "vectorized"),
    [pytest.param(*case, marks=[pytest.mark.long] * is_slow(*case[:2])) for case in CASES],
)
def test_equals_autodiff(law, way, given, name, vectorized):
    model = MODELS[name]
    h = model.engine(given, vectorized=vectorized)
    came = found_in(WAYS[way], law, model.spread(h))
    check(came, law(model.spread(model.true)), given)


ARGS = {"all": (X, A), "one shared": (X, A[0]), "none": (X[:0], A[:0])}


@pytest.mark.parametrize(
    ("given", "how", "which"), spread(GIVEN, ["vectorized", "by member", "by an executor"], ARGS)
)
def test_batches(given, how, which):
    """Of an empty one, no call is made."""
    args = ARGS[which]
    with ThreadPoolExecutor(2) as threads:
        executor = threads if how == "by an executor" else None
        h = ARRAY.engine(given, vectorized=how == "vectorized", executor=executor)
        n = len(args[0])
        for run in (gradients, tf.function(gradients)):
            check(run(h, args, U[:n]), gradients(true, args, U[:n]), given)
    steps = {"2-point": 3, "3-point": 6}.get(given, 0)
    calls = min(n, 1) * (1 + bool(steps)) if how == "vectorized" else n * (1 + steps)
    assert h.calls == 2 * calls


@ALL_GIVEN
def test_dtypes_and_static_shapes(given):
    h = ARRAY.engine(given, vectorized=True, on_error=-np.inf)
    run = tf.function(lambda x, a: gradients(h, (x, a), tf.cast(U, tf.float32)))
    spec = [tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None], tf.float32)]
    y, by_x, by_a = run.get_concrete_function(*spec).structured_outputs
    assert [y.dtype, by_x.dtype, by_a.dtype] == [tf.float32] * 3
    assert [y.shape.as_list(), by_x.shape.as_list()] == [[None, 3], [None, 2]]
    along = tf.function(forward_derivative(h)).get_concrete_function(*spec).structured_outputs
    assert along.shape.as_list() == [None, 3]
    check(run(X.astype("float32"), A.astype("float32")), gradients(true), rtol=1e-5)


@WRAPS
def test_products_are_computed_on_request(wrap):
    h = ARRAY.engine("products", vectorized=True)
    counts = lambda: (h.calls, h.vjp_calls, h.jvp_calls)  # noqa: E731
    wrap(h)(X, A)
    assert counts() == (1, 0, 0)
    wrap(lambda x, a: gradients(h, (x, a)))(tf.constant(X), tf.constant(A))
    assert counts() == (2, 1, 0)
    wrap(lambda: forward_derivative(h)(tf.constant(X), tf.constant(A)))()
    calls = 3 if wrap is not tf.function else 2  # TensorFlow drops what nobody uses
    assert counts() == (calls, 1, 1)
    wrap(lambda x, a: gradients(mapped(h), (x, a)))(tf.constant(X), tf.constant(A))
    assert counts() == (calls + 1, 2, 1)
    assert f": calls {calls + 1}, vjp_calls 2, jvp_calls 1, hess_calls 0, " in repr(h)


def test_a_matrix_of_a_dictionary():
    h = sgtrick.from_numpy(
        lambda p: np.outer(p["b"], p["a"]),
        vjp=lambda p, u: {"a": u.T @ p["b"], "b": u @ p["a"]},
        value_shape=(3, 2),
    )
    run = derivative(lambda p: tf.reduce_sum(h(p) * np.outer(U[1], X[1])))
    by_p = run({"a": tf.constant(X[0]), "b": tf.constant(U[0])})
    check([by_p["a"], by_p["b"]], [U[1] @ U[0] * X[1], X[1] @ X[0] * U[1]])


class TestDifferences:
    @SCHEMES
    def test_steps_are_those_of_scipy(self, scheme):
        x = np.array([1e-3, -0.7, 0.0, -1e8, 250.0])
        f = lambda x: np.exp(np.sin(x)).prod()  # noqa: E731
        h = sgtrick.from_numpy(f, grad=scheme)
        assert f"grad='{scheme}'" in repr(h)
        _, came = gradients(h, (x,), None)
        np.testing.assert_allclose(came, approx_derivative(f, x, scheme), rtol=1e-12)

    @SCHEMES
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    @pytest.mark.parametrize("narrow", ["float16", "float32", "float64"])
    def test_steps_are_those_of_the_narrowest_dtype(self, scheme, narrow, dtype):
        """Which is that of the value, as PyTorch or ONNX returns it, or that of the arguments."""
        x = np.array([0.3, -0.7, 2.0], dtype)
        f = lambda x: (np.sum(np.sin(x)) + 1).astype(narrow)  # noqa: E731
        _, came = gradients(sgtrick.from_numpy(f, grad=scheme, dtype=dtype), (x,), None)
        np.testing.assert_allclose(came, approx_derivative(f, x, scheme), rtol=1e-3)
        np.testing.assert_allclose(came, np.cos(x), atol=0.1)

    @pytest.mark.parametrize(
        ("scheme", "vectorized", "narrow", "way"),
        spread(WITHIN, [True, False], ["float32", "bfloat16"], WAYS),
    )
    def test_one_value_of_several_is_narrow(self, scheme, vectorized, narrow, way):
        narrow = tf.as_dtype(narrow).as_numpy_dtype

        def sines(x):
            y = np.sin(x).sum(-1) + 1
            return {"wide": y, "narrow": y.astype(narrow), "count": np.ones(y.shape, int)}

        h = sgtrick.from_numpy(
            sines,
            grad=scheme,
            vectorized=vectorized,
            value_shape={"wide": (), "narrow": (), "count": ()},
        )
        came = found_in(
            WAYS[way], lambda f: gradients(f, (X,), None), lambda x: tf.nest.flatten(h(x))
        )
        within = 0.5 if narrow.__name__ == "bfloat16" else 1e-2
        np.testing.assert_allclose(came[-1], 2 * np.cos(X), atol=within)

    @SCHEMES
    def test_beside_arguments_without_derivatives(self, scheme):
        def engine(data, n, x):
            return n * np.sum(x**2 * data["scale"])

        h = sgtrick.from_numpy(engine, grad=scheme, event_ndims=(1, 0, 2))
        scale, x = np.array([1.0, 2.0, 3.0]), np.ones([2, 3])
        came = gradients(lambda s, x: h({"scale": s}, tf.constant(5), x), (scale, x), None)
        check(came, [60, [10, 10, 10], 10 * x * scale], scheme)
        h = sgtrick.from_numpy(lambda n: float(n) ** 2, grad=scheme, event_ndims=0)
        np.testing.assert_array_equal(h(tf.constant([2, 3])), [4, 9])

    @SCHEMES
    def test_of_no_entries(self, scheme):
        h = sgtrick.from_numpy(lambda x, a: np.sum(x) + a**2, grad=scheme, event_ndims=(1, 0))
        check(gradients(h, (X[:, :0], A), None), [A**2, X[:, :0], 2 * A], scheme)
        h = sgtrick.from_numpy(lambda x: 1.0 + np.sum(x), grad=scheme)
        check(gradients(h, (X[:, :0],), None), [np.ones(4), X[:, :0]], scheme)

    @SCHEMES
    @pytest.mark.parametrize("x", [[np.inf, 1.0], [np.nan, 1.0], [1e308, -1e308], [0.0, 0.0]])
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_where_numpy_is_told_to_raise(self, scheme, x, dtype):
        """The engine may, and it is all that does."""
        h = sgtrick.from_numpy(lambda x: x[1], grad=scheme, dtype=dtype)
        found = []
        for mode in ("ignore", "raise"):
            with np.errstate(all=mode), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                found.append(gradients(h, (np.array(x),), None))
        check(*found)
        h = sgtrick.from_numpy(lambda x: np.log(0 * x[0]), grad=scheme)
        with (
            np.errstate(all="raise"),
            pytest.raises(RuntimeError, match="<lambda> raised FloatingPointError"),
        ):
            h(np.ones(2))

    @SCHEMES
    @VECTORIZED
    def test_where_neighbours_fail(self, scheme, vectorized):
        def engine(x):
            if np.any(np.abs(x) > 1):
                raise ArithmeticError("no solution")
            return np.sum(x, -1)

        h = sgtrick.from_numpy(engine, grad=scheme, vectorized=vectorized, on_error=-5.0)
        x = [[0.5, 0.5], [3.0, 0.5], [1.0, 0.5]]  # right, failed, failed beside
        with pytest.warns(RuntimeWarning, match="is not finite"):
            y, g = gradients(h, (np.array(x),), None)
        np.testing.assert_allclose(y, [1, -5, 1.5])
        np.testing.assert_allclose(g, [[1, 1], [0, 0], [np.nan, 1]], rtol=1e-6)
        h = sgtrick.from_numpy(engine, grad=scheme, vectorized=vectorized)
        message = f"(?s)no solution.*x = .*step of grad='{scheme}', not a point that was passed"
        assert h(tf.constant([1.0, 0.0])) == 1
        with pytest.raises(RuntimeError, match=message):
            gradients(h, (np.array([1.0, 0.0]),), None)


@VECTORIZED
@pytest.mark.parametrize(
    ("given", "failing"), [("grad", "value"), ("products", "value"), ("products", "vjp")]
)
def test_failures(given, failing, vectorized):
    """The value becomes a constant; where the vjp alone fails, the gradient is not known."""

    def fails(f):
        def engine(x, *rest):
            if np.any(x == X[1]):
                raise ArithmeticError("no solution")
            return f(x, *rest)

        return engine

    model = ARRAY._replace(**{failing: fails(getattr(ARRAY, failing))})
    expected = [t.numpy() for t in gradients(true)]
    instead = (-7.0, 0, 0) if failing == "value" else (expected[0][1], np.nan, np.nan)
    for array, at_failure in zip(expected, instead, strict=True):
        array[1] = at_failure
    came = gradients(model.engine(given, vectorized=vectorized, on_error=-7.0))
    check(came, expected)


@WRAPS
@pytest.mark.parametrize("lost", ["all members", "one gradient"])
def test_values_of_two_shapes(lost, wrap):
    """The shape of what is lost is not that of any array that came."""

    def engine(x):
        if lost == "all members":
            raise ArithmeticError("no solution")
        return {"curve": W @ x, "size": x @ x}, {"curve": None, "size": 2 * x}

    h = sgtrick.from_numpy(engine, value_shape={"curve": (3,), "size": ()}, on_error=-7.0)

    def value_and_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x)
        return y["curve"], y["size"], tape.gradient(y["size"], x)

    came = wrap(value_and_gradient)(tf.constant(X))
    expected = [X @ W.T, np.sum(X**2, -1), 2 * X]
    if lost == "all members":
        expected = [np.full((4, 3), -7.0), np.full(4, -7.0), np.zeros((4, 2))]
    for array, other in zip(came, expected, strict=True):
        np.testing.assert_allclose(array, other)


class TestWithoutGradient:
    """`grad=False`: for samplers that need none."""

    @staticmethod
    def log_prob(x):
        return -0.5 * np.sum(x**2, -1)

    @WRAPS
    def test_a_gradient_is_an_error(self, wrap):
        h = sgtrick.from_numpy(self.log_prob, grad=False, vectorized=True)
        np.testing.assert_allclose(wrap(h)(X), self.log_prob(X))
        np.testing.assert_allclose(wrap(mapped(h))(X), self.log_prob(X))
        message = r"asked for a gradient, but its engine has none, grad=False\. Return \(value, gra"
        with pytest.raises((LookupError, tf.errors.OpError), match=message):
            wrap(derivative(h))(tf.constant(X))
        with pytest.raises(NotImplementedError, match=r"forward mode, .* its engine has no jvp="):
            wrap(forward_derivative(h))(tf.constant(X))


@pytest.mark.parametrize("given", ["grad", "products", "3-point"])
@WRAPS
def test_second_derivatives_are_errors(wrap, given):
    h = ARRAY.engine(given, vectorized=True)
    second = derivative(derivative(lambda x: h(x, A)))
    with pytest.raises((LookupError, tf.errors.OpError), match="asked for a second derivative"):
        wrap(second)(tf.constant(X))


@WRAPS
def test_derivatives_that_were_not_given_are_errors(wrap):
    only_vjp, only_jvp = (
        sgtrick.from_numpy(ARRAY.value, **{name: getattr(ARRAY, name)}, event_ndims=(1, 0),
                           value_shape=(3,))
        for name in ("vjp", "jvp")
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"has no jvp=\. Pass jvp="):
        wrap(lambda: by_forward_mode(only_vjp))()
    with pytest.raises((LookupError, tf.errors.OpError), match=r"has only jvp=\. Pass vjp="):
        wrap(lambda: gradients(only_jvp))()
