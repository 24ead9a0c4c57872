"""Second derivatives of engines, by `hessp`.

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
from shared import WRAPS, derivative, pushed


def engine(name, first, **options):
    """An engine of the model with this value."""
    model = MODELS[name]
    return model.engine(first, hessp=model.hessp, **options)


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


def is_valid(law, way, first, name, _):
    # TensorFlow has None for this, of its own operations too.
    return law is not reverse_over_forward or way != "around tf.function"


CASES = [
    pytest.param(*case, marks=[pytest.mark.long] * (case[1] == "around tf.function"))
    for case in spread(
        LAWS,
        [way for way in WAYS if "vectorized_map" not in way],
        [first for first in GIVEN if "point" not in first],
        MODELS,
        [True, False],
        valid=is_valid,
    )
] + [
    pytest.param(law, "around vectorized_map", first, name, True, marks=pytest.mark.long)
    for law, first, name in (
        (reverse_over_reverse, "grad", "array"),
        (of_a_likelihood, "grad", "structure"),
        (reverse_over_reverse, "products", "structure"),
    )
]


@pytest.mark.parametrize(("law", "way", "first", "name", "vectorized"), CASES)
def test_equals_autodiff(law, way, first, name, vectorized):
    model = MODELS[name]
    options = {"value_shape": {"curve": (3,), "size": ()}} if name == "structure" else {}
    h = engine(name, first, vectorized=vectorized, **options)
    close(WAYS[way](law, model.spread(h)), law(model.spread(model.true)))


@WRAPS
@VECTORIZED
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_calls_dtypes_and_static_shapes(wrap, vectorized, dtype):
    h, seen = engine("number", "grad", vectorized=vectorized), []
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
@VECTORIZED
@pytest.mark.parametrize("over", ["x", "v", "both", "nested"])
def test_mapped(wrap, vectorized, over):
    h = engine("number", "grad", vectorized=vectorized)
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

    def native(self, p):
        flat = [tf.reshape(p[k], [-1, math.prod(shape)]) for k, shape in self.SHAPES.items()]
        z = tf.concat([tf.broadcast_to(t, [4, t.shape[1]]) for t in flat], -1)
        return tf.cast(p["n"], tf.float64) * tf.reduce_sum(z * (z @ self.H), -1) / 2

    @WRAPS
    @VECTORIZED
    @pytest.mark.parametrize("shared", [True, False])
    def test_mixed_blocks(self, wrap, vectorized, shared):
        """Some parts may be shared by all members."""
        h = sgtrick.from_numpy(
            self.engine,
            event_ndims={"a": 0, "n": 0, "x": 1, "y": 2},
            vectorized=vectorized,
            hessp=self.hessp,
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


class TestWhereTheEngineFailed:
    """Its value is replaced by a constant there, so `hessp` is the Hessian of something else."""

    X = tf.constant([[0.5, 2.0], [2.0, 3.0], [1.0, -1.0]], tf.float64)
    HESSIANS = np.array([np.diag([3.0, 12.0]), np.full([2, 2], np.nan), np.diag([6.0, -6.0])])

    @pytest.fixture(params=[True, False], ids=["vectorized", "by member"])
    def h(self, request):
        def cubes(x):
            if np.any(x[..., 0] > 1.5):
                raise ArithmeticError
            return np.sum(x**3, -1), 3 * x**2

        return sgtrick.from_numpy(
            cubes, hessp=lambda x, v: 6 * x * v, on_error=-1e3, vectorized=request.param
        )

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
        [mapped, lambda f: tf.function(mapped(f))],
        ids=["mapped", "mapped in tf.function"],
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
        h = engine("array", first)
        third = derivative(derivative(lambda x: pulled(h, x, tf.constant(A))[0]))
        with pytest.raises(RAISED, match="asked for a third derivative"):
            wrap(third)(tf.constant(X))

    @pytest.mark.parametrize("first", ["grad", "products"])
    def test_forward_over_forward_mode_raises(self, first):
        h = engine("array", first)
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
    def test_mixed_blocks_of_structures_when_asked_for(self, wrap):
        traced = []

        def f(p, n):
            traced.append(n)
            return (p["x"] ** 2).sum() * self.np.exp(p["a"]) * n

        h = self.form(f, event_ndims=({"a": 0, "x": 1}, 0))
        p, v = {"a": tf.constant(A), "x": tf.constant(X)}, [tf.constant(A), tf.constant(V)]

        def native(p, n):
            return tf.reduce_sum(p["x"] ** 2, -1) * tf.exp(p["a"]) * tf.cast(n, tf.float64)

        n = tf.constant(3)
        np.testing.assert_allclose(h(p, n), native(p, n))
        first = len(traced)
        run = wrap(lambda p, v: hessian_times(h, [p, n], v))
        close(run(p, v), hessian_times(native, [p, n], v))
        assert len(traced) > first
        assert h.hess_calls == 1

    def test_linear_functions(self):
        h = self.form(lambda x: 3 * x.sum())
        (came,) = hessian_times(h, [tf.constant(X)], [V])
        np.testing.assert_array_equal(came, np.zeros([4, 2]))

    def test_mapped_over_the_vectors_alone(self):
        h = self.form(lambda x: x[0] ** 2 * self.np.exp(x[1]))
        x = tf.constant([0.5, 0.0], tf.float64)
        rows = mapped(lambda v: hessian_times(h, [x], [v])[0])(tf.eye(2, dtype=tf.float64))
        np.testing.assert_allclose(rows, [[2, 1], [1, 0.25]], rtol=1e-12)
        assert h.hess_calls == 1
