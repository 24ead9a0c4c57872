"""Second derivatives of engines: by `hessp`, `hess` and differences of the gradient.

The oracle is autodiff of the same model in TensorFlow.
"""

import math

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from array_model import (
    GIVEN,
    MODELS,
    RAISED,
    VECTORIZED,
    WAYS,
    A,
    U,
    V,
    X,
    forward_over_reverse,
    mapped,
    of_a_likelihood,
    pulled,
    reverse_over_forward,
    reverse_over_reverse,
    true,
)
from matrix import spread
from shared import WRAPS, derivative, gradient, pushed

# How the Hessian is given, and how exact it is: of "2-point", half the digits are left.
SECOND = {"hessp": 1e-12, "hess": 1e-12, "3-point": 1e-7, "2-point": 1e-5}
KINDS = pytest.mark.parametrize("second", ["hess", "hessp"])


def engine(name, first, second, **options):
    """An engine of the model with this value."""
    model = MODELS[name]
    given = {second: getattr(model, second)} if second in ("hessp", "hess") else {"hess": second}
    return model.engine(first, **given, **options)


def hessian_times(h, args, vs):
    """The Hessian of the sum of `h`, times `vs`."""
    xs = [x for x in tf.nest.flatten(args) if x.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        with tf.GradientTape() as inner:
            inner.watch(xs)
            y = h(*args)
        gradients = inner.gradient(y, xs)
    return tape.gradient(gradients, xs, vs, unconnected_gradients="zero")


def close(came, want, rtol=1e-12):
    for a, b in zip(came, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


LAWS = [reverse_over_reverse, forward_over_reverse, reverse_over_forward, of_a_likelihood]


def is_valid(law, way, first, second, name, _):
    if law is reverse_over_forward and way == "around tf.function":
        return False  # TensorFlow has None for this, of its own operations too
    return second != "hess" or name == "number"


CASES = spread(
    LAWS,
    [way for way in WAYS if "vectorized_map" not in way],
    [first for first in GIVEN if "point" not in first],
    SECOND,
    MODELS,
    [True, False],
    together=3,
    valid=is_valid,
) + [
    pytest.param(law, "around vectorized_map", first, second, name, True, marks=pytest.mark.long)
    for law, first, second, name in (
        (reverse_over_reverse, "grad", "hessp", "array"),
        (of_a_likelihood, "grad", "hessp", "structure"),
        (reverse_over_reverse, "products", "3-point", "structure"),
        (of_a_likelihood, "products", "3-point", "array"),
    )
]


@pytest.mark.parametrize(("law", "way", "first", "second", "name", "vectorized"), CASES)
def test_equals_autodiff(law, way, first, second, name, vectorized):
    model = MODELS[name]
    options = {"value_shape": {"curve": (3,), "size": ()}} if name == "structure" else {}
    h = engine(name, first, second, vectorized=vectorized, **options)
    expected = law(model.spread(model.true))
    close(WAYS[way](law, model.spread(h)), expected, SECOND[second])


@WRAPS
@KINDS
@VECTORIZED
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_calls_dtypes_and_static_shapes(wrap, second, vectorized, dtype):
    h, seen = engine("number", "grad", second, vectorized=vectorized), []
    x, a, v = tf.constant(X, dtype), tf.constant(A, dtype), tf.constant(V, dtype)

    def run(x):
        (along,) = hessian_times(lambda x: h(x, a), [x], [v])
        seen.append((along.dtype, along.shape))
        return along

    (want,) = hessian_times(lambda x: MODELS["number"].true(x, A), [tf.constant(X)], [V])
    np.testing.assert_allclose(wrap(run)(x), want, rtol=1e-4 if dtype == "float32" else 1e-12)
    assert seen == [(dtype, [4, 2])]
    assert (h.hess_calls, h.failures) == (1 if vectorized else 4, 0)


@pytest.mark.long
@WRAPS
@KINDS
@VECTORIZED
@pytest.mark.parametrize("over", ["x", "v", "both", "nested"])
def test_mapped(wrap, second, vectorized, over):
    h = engine("number", "grad", second, vectorized=vectorized)
    x = tf.constant(X if over != "v" else X[0])
    v = tf.constant(V if over != "x" else V[0])

    def times(f, x, v):
        return hessian_times(lambda x: f(x, tf.constant(A[0])), [x], [v])[0]

    def run(x, v):
        of_x, of_v = (lambda x: times(h, x, v)), (lambda v: times(h, x, v))
        if over == "x":
            return mapped(of_x)(x)
        if over == "v":
            return mapped(of_v)(v)
        if over == "both":
            return mapped(lambda x, v: times(h, x, v))(x, v)
        return mapped(lambda x: mapped(lambda v: times(h, x, v))(v))(x)

    came = wrap(run)(x, v)
    if over == "nested":
        x = x[:, tf.newaxis]
    x, v = (tf.broadcast_to(t, came.shape) for t in (x, v))
    close([came], [times(MODELS["number"].true, x, v)])
    assert h.hess_calls == (1 if vectorized else len(tf.reshape(came, [-1, 2])))


@pytest.mark.parametrize("first", ["grad", "products"])
def test_a_whole_hessian_by_differences(first):
    """In which the vectors for one argument are mapped, and those for the other are not."""

    def hessian(f):
        x = tf.constant(X[0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            g = gradient(lambda x: f(x, tf.constant(A[0])), x, U[0])
        return tape.jacobian(g, x)

    close([hessian(engine("array", first, "3-point"))], [hessian(true)], 1e-6)


@pytest.mark.parametrize("size", [1.0, 1e8, 1e12])
@pytest.mark.parametrize("scheme", ["2-point", "3-point"])
def test_differences_of_entries_of_any_size(scheme, size):
    h = sgtrick.from_numpy(lambda x: (x[0] * x[1], x[::-1]), hess=scheme)
    v = tf.constant([1.0, 1.0], tf.float64)
    (came,) = hessian_times(h, [tf.constant([size, 1.0], tf.float64)], [v])
    np.testing.assert_allclose(came, v, rtol=1e-4)


class TestSeveralParts:
    """`n z' H z / 2`: the argument is a dict of the integer `n` and of the parts of `z`."""

    H = np.random.default_rng(3).normal(size=(8, 8))
    H = H + H.T
    SHAPES = {"a": (), "x": (3,), "y": (2, 2)}
    PLACES = {"a": slice(0, 1), "x": slice(1, 4), "y": slice(4, 8)}

    def parts(self, z):
        shapes = {k: (*z.shape[:-1], *shape) for k, shape in self.SHAPES.items()}
        return {k: z[..., self.PLACES[k]].reshape(shapes[k]) for k in shapes} | {"n": None}

    def joined(self, p):
        front = np.shape(p["a"])
        return np.concatenate([np.reshape(p[k], (*front, -1)) for k in self.SHAPES], -1)

    def engine(self, p):
        z, n = self.joined(p), p["n"][..., np.newaxis]
        return np.sum(n * z * (z @ self.H), -1) / 2, self.parts(n * (z @ self.H))

    def hessp(self, p, v):
        assert v["n"] is None
        return self.parts(p["n"][..., np.newaxis] * (self.joined(v) @ self.H))

    def hess(self, p):
        def block(i, j):
            h = self.H[self.PLACES[i], self.PLACES[j]]
            return np.multiply.outer(p["n"], h.reshape(self.SHAPES[i] + self.SHAPES[j]))

        return {i: {j: block(i, j) for j in self.SHAPES} | {"n": None} for i in self.SHAPES} | {
            "n": None
        }

    def native(self, p):
        flat = [tf.reshape(p[k], [-1, math.prod(shape)]) for k, shape in self.SHAPES.items()]
        z = tf.concat([tf.broadcast_to(t, [4, t.shape[1]]) for t in flat], -1)
        return tf.cast(p["n"], tf.float64) * tf.reduce_sum(z * (z @ self.H), -1) / 2

    @WRAPS
    @KINDS
    @VECTORIZED
    @pytest.mark.parametrize("shared", [True, False])
    def test_mixed_blocks(self, wrap, second, vectorized, shared):
        """Some parts may be shared by all members."""
        h = sgtrick.from_numpy(
            self.engine,
            event_ndims={"a": 0, "n": 0, "x": 1, "y": 2},
            vectorized=vectorized,
            **{second: getattr(self, second)},
        )
        random = np.random.default_rng(4)
        batches = {"a": [] if shared else [4], "x": [4], "y": [] if shared else [4]}
        p, v = (
            {k: tf.constant(random.normal(size=[*batches[k], *self.SHAPES[k]])) for k in batches}
            for _ in range(2)
        )
        p["n"] = tf.constant([1, 2, 3, 4])
        run = wrap(lambda f: hessian_times(f, [p], tf.nest.flatten(v)))
        close(run(h), run(self.native))

    @WRAPS
    def test_blocks_that_are_not_known_are_nan_unless_the_vector_is_zero_there(self, wrap):
        h = sgtrick.from_numpy(
            lambda x, data: (np.sum(x**2), (2 * x, 0 * data)),
            hess=lambda x, data: ((2 * np.eye(2), None), (None, None)),
        )
        x = tf.constant(X)
        zero = tf.zeros_like(x)
        run = wrap(lambda v, w: hessian_times(h, [x, x + 0], [v, w]))
        by_x, by_data = run(x, zero)
        np.testing.assert_array_equal(by_x, 2 * X)
        assert np.isnan(by_data).all()
        np.testing.assert_array_equal(run(zero, zero), np.zeros([2, 4, 2]))
        assert np.isnan(run(x, x)[0]).all()


class TestSymmetry:
    """A Hessian is symmetric, so that reverse mode may use rows and forward mode columns."""

    @WRAPS
    @VECTORIZED
    @pytest.mark.parametrize("on_error", ["raise", -np.inf])
    def test_of_one_triangle_is_refused(self, wrap, vectorized, on_error):
        h = sgtrick.from_numpy(
            lambda x: (np.sum(x**2, -1), 2 * x),
            hess=lambda x: np.triu(2 + 0 * x[..., None] * np.ones([2, 2])),
            vectorized=vectorized, on_error=on_error, name="f",
        )  # fmt: skip
        message = (
            r"the Hessian of f with respect to x and x must be symmetric, got .* and, with rows "
            r"and columns exchanged, 0\. Return all of it, not one triangle"
        )
        with pytest.raises(RAISED, match=message):
            wrap(lambda: hessian_times(h, [tf.constant(X)], [V]))()

    @pytest.mark.parametrize("zero", [0.0, None])
    def test_of_blocks(self, zero):
        """A block that is unknown is not one that is zero."""
        h = sgtrick.from_numpy(
            lambda x, a: (x @ x * a, (2 * a * x, x @ x)),
            hess=lambda x, a: ((2 * a * np.eye(2), 2 * x), (zero if zero is None else 0 * x, 0.0)),
            event_ndims=(1, 0),
        )
        x, a, v = tf.constant(X[0]), tf.constant(2.0, tf.float64), tf.constant(V[0])
        if zero is None:
            by_x, by_a = hessian_times(h, [x, a], [v, a])
            close([by_x], [4 * v + 4 * x])
            assert np.isnan(by_a)
        else:
            message = "the Hessian of .* with respect to x and a must be symmetric"
            with pytest.raises(ValueError, match=message):
                hessian_times(h, [x, a], [v, a])

    @WRAPS
    @VECTORIZED
    def test_up_to_rounding_the_symmetric_part_counts(self, wrap, vectorized):
        """A large entry of one member does not excuse those of the others."""
        scales = np.array([1.0, 1e6, 1e-6, 1.0])[:, np.newaxis]
        noise = np.random.default_rng(5).normal(size=(2, 2)) * 1e-5

        def hess(x):
            return x[..., 0, np.newaxis, np.newaxis] * (np.ones((2, 2)) + noise)

        h = sgtrick.from_numpy(lambda x: (x[..., 0], 0 * x), hess=hess, vectorized=vectorized)
        x = tf.constant(scales * np.ones((4, 2)))
        (came,) = wrap(lambda: hessian_times(h, [x], [V]))()
        part = np.ones((2, 2)) + (noise + noise.T) / 2
        np.testing.assert_allclose(came, scales * (V @ part), rtol=1e-10)

        noise[0, 1] += 0.01
        with pytest.raises(RAISED, match="must be symmetric"):
            wrap(lambda: hessian_times(h, [x], [V]))()

    @pytest.mark.parametrize(
        ("hessian", "want"),
        [
            (np.array([[0, 1], [1, 0]], np.uint8), [1.0, 1.0]),
            (np.array([[np.nan, np.inf], [np.inf, 1.0]]), [np.nan, np.inf]),
        ],
        ids=["unsigned integers", "not finite"],
    )
    def test_of_any_numbers(self, hessian, want):
        h = sgtrick.from_numpy(lambda x: (x[0], x), hess=lambda x: hessian)
        x = tf.ones([2], tf.float64)
        np.testing.assert_array_equal(hessian_times(h, [x], [x])[0], want)


class TestWhereTheEngineFailed:
    """Its value is replaced by a constant there, so `hessp` is the Hessian of something else."""

    X = tf.constant([[0.5, 2.0], [2.0, 3.0], [1.0, -1.0]], tf.float64)
    HESSIANS = np.array([np.diag([3.0, 12.0]), np.full([2, 2], np.nan), np.diag([6.0, -6.0])])
    GIVEN = {
        "hess": {"hess": lambda x: 6 * x[..., np.newaxis] * np.eye(2)},
        "hessp": {"hessp": lambda x, v: 6 * x * v},
        "3-point": {"hess": "3-point"},
    }

    @pytest.fixture(params=spread([True, False], [True, False], GIVEN), ids=str)
    def h(self, request):
        vectorized, has_aux, second = request.param

        def cubes(x):
            if np.any(x[..., 0] > 1.5):
                raise ArithmeticError
            y = np.sum(x**3, -1)
            return (y, x) if has_aux else y, 3 * x**2

        h = sgtrick.from_numpy(
            cubes, on_error=-1e3, vectorized=vectorized, has_aux=has_aux, **self.GIVEN[second]
        )
        return (lambda x: h(x)[0]) if has_aux else h

    def by_tapes(self, f):
        def run(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                g = derivative(f)(x)
            return outer.batch_jacobian(g, x)

        return run

    def by_forward_mode(self, f):
        return lambda x: tf.stack([pushed(derivative(f), x, 0 * x + v) for v in np.eye(2)], -1)

    def of_a_sum(self, f):
        of_both = self.by_tapes(lambda x: f(x) + tf.reduce_sum(x**2, -1))
        return lambda x: of_both(x) - 2 * tf.eye(2, dtype=x.dtype)

    def of_unknown_dimensions(self, f):
        return tf.function(self.by_tapes(f), input_signature=[tf.TensorSpec([None, 2], tf.float64)])

    @pytest.mark.long
    @WRAPS
    @pytest.mark.parametrize("inside", [lambda f: f, tf.function], ids=["", "around"])
    @pytest.mark.parametrize(
        "mode", ["by_tapes", "by_forward_mode", "of_a_sum", "of_unknown_dimensions"]
    )
    def test_second_derivatives_are_nan(self, h, wrap, inside, mode):
        came = wrap(getattr(self, mode)(inside(h)))(self.X)
        np.testing.assert_allclose(came, self.HESSIANS, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        "wrap",
        [mapped, lambda f: tf.function(mapped(f)),
         lambda f: tf.function(f, input_signature=[tf.TensorSpec(None, tf.float64)])],
        ids=["mapped", "mapped in tf.function", "unknown rank"],
    )  # fmt: skip
    def test_sums_of_rows_are_nan(self, h, wrap):
        came = wrap(derivative(derivative(h)))(self.X)
        np.testing.assert_allclose(came, self.HESSIANS.sum(-1), rtol=1e-6)

    def test_first_derivatives_are_zero(self, h):
        np.testing.assert_array_equal(h(self.X), [8.125, -1000.0, 0.0])
        np.testing.assert_array_equal(derivative(h)(self.X), [[0.75, 12], [0, 0], [3, 3]])


@WRAPS
@VECTORIZED
def test_failures_of_the_hessian_alone_are_nan_where_they_are(wrap, vectorized):
    def hessp(x, v):
        if np.any(x[..., 0] > 1):
            raise ArithmeticError
        return -v

    h = sgtrick.from_numpy(
        lambda x: (-0.5 * np.sum(x**2, -1), -x),
        hessp=hessp, on_error=-np.inf, vectorized=vectorized,
    )  # fmt: skip
    x = tf.constant([[0.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    (came,) = wrap(lambda x: hessian_times(h, [x], [x]))(x)
    np.testing.assert_array_equal(came, [[0, -1], [np.nan, np.nan], [-1, -1]])
    assert (h.failures, h.nonfinite) == (1, 0)


class TestUnknown:
    @pytest.mark.parametrize("first", ["grad", "products"])
    @WRAPS
    def test_third_derivatives_raise(self, first, wrap):
        h = engine("array", first, "hessp")
        third = derivative(derivative(lambda x: pulled(h, x, tf.constant(A))[0]))
        with pytest.raises(RAISED, match="asked for a third derivative"):
            wrap(third)(tf.constant(X))

    @pytest.mark.parametrize("first", ["grad", "products"])
    def test_forward_over_forward_mode_raises(self, first):
        h = engine("array", first, "hessp")
        x, t = tf.constant(X), tf.constant(V)
        with pytest.raises(RAISED, match="forward mode over forward mode, which hessp= does not"):
            pushed(lambda x: pushed(lambda x: h(x, tf.constant(A)), x, t), x, t)

    def test_without_jvp(self):
        """Some second derivatives need none."""
        model = MODELS["array"]
        h = sgtrick.from_numpy(
            model.value, vjp=model.vjp, hessp=model.hessp, event_ndims=(1, 0), value_shape=(3,)
        )
        close(reverse_over_reverse(h), reverse_over_reverse(true))
        with pytest.warns(RuntimeWarning, match=r"has no jvp=\. Pass jvp="):
            by_x, by_a = of_a_likelihood(h)
        assert np.isnan(by_x).all()
        assert np.isnan(by_a).all()


@pytest.mark.parametrize("package", ["torch", "jax"])
class TestFrameworks:
    """Of functions to a number; those to arrays have tests of their own."""

    @pytest.fixture(autouse=True)
    def _form(self, package):
        self.np = pytest.importorskip("torch" if package == "torch" else "jax.numpy")
        self.form = getattr(sgtrick, f"from_{package}")

    @WRAPS
    @VECTORIZED
    def test_mixed_blocks_of_structures_when_asked_for(self, wrap, vectorized):
        traced = []

        def f(p, n):
            traced.append(n)
            return (p["x"] ** 2).sum() * self.np.exp(p["a"]) * n

        h = self.form(f, event_ndims=({"a": 0, "x": 1}, 0), vmap=vectorized)
        p, v = {"a": tf.constant(A), "x": tf.constant(X)}, [tf.constant(A), tf.constant(V)]

        def native(p, n):
            return tf.reduce_sum(p["x"] ** 2, -1) * tf.exp(p["a"]) * tf.cast(n, tf.float64)

        n = tf.constant(3)
        np.testing.assert_allclose(h(p, n), native(p, n))
        first = len(traced)
        close(wrap(lambda: hessian_times(h, [p, n], v))(), hessian_times(native, [p, n], v))
        assert len(traced) > first
        assert h.hess_calls == (1 if vectorized else 4)

    def test_aux_and_linear_functions(self):
        h = self.form(lambda x: (3 * x.sum(), x), has_aux=True)
        (came,) = hessian_times(lambda x: h(x)[0], [tf.constant(X)], [V])
        np.testing.assert_array_equal(came, np.zeros([4, 2]))

    def test_mapped_over_the_vectors_alone(self):
        h = self.form(lambda x: x[0] ** 2 * self.np.exp(x[1]))
        x = tf.constant([0.5, 0.0], tf.float64)
        rows = mapped(lambda v: hessian_times(h, [x], [v])[0])(tf.eye(2, dtype=tf.float64))
        np.testing.assert_allclose(rows, [[2, 1], [1, 0.25]], rtol=1e-12)
        assert h.hess_calls == 1
