"""Second derivatives of engines, by `hessp`.

The oracle is autodiff of the same model in TensorFlow.
"""

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
    found_in,
    of_a_likelihood,
    pulled,
    reverse_over_forward,
    reverse_over_reverse,
    true,
)
from matrix import spread
from shared import EXECUTED, WRAPS, derivative, mapped, pushed


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
    if way == "around tf.function":
        # TensorFlow has None for this, of its own operations too.
        return law is not reverse_over_forward and (
            law is not forward_over_reverse or name == "number"
        )
    return True


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
        (of_a_likelihood, "grad", "structure"),
        (reverse_over_reverse, "products", "structure"),
    )
]


@pytest.mark.parametrize(("law", "way", "first", "name", "vectorized"), CASES)
def test_equals_autodiff(law, way, first, name, vectorized):
    model = MODELS[name]
    options = {"value_shape": {"curve": (3,), "size": ()}} if name == "structure" else {}
    h = engine(name, first, vectorized=vectorized, **options)
    close(found_in(WAYS[way], law, model.spread(h)), law(model.spread(model.true)))


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
@pytest.mark.parametrize(
    ("over", "vectorized", "wrap"),
    spread(["x", "v", "both", "nested"], [True, False], EXECUTED.values()),
)
def test_mapped(over, vectorized, wrap):
    h = engine("number", "grad", vectorized=vectorized)
    x = tf.constant(X if over != "v" else X[0])
    v = tf.constant(V if over != "x" else V[0])

    def times(f, x, v):
        return hessian_times(lambda x: f(x, tf.constant(A[0])), [x], [v])[0]

    def run(x, v):
        if over == "x":
            return mapped(lambda x: times(h, x, v))(x)
        if over == "v":
            return mapped(lambda v: times(h, x, v))(v)
        if over == "both":
            return mapped(lambda x, v: times(h, x, v))(x, v)
        return mapped(lambda x: mapped(lambda v: times(h, x, v))(v))(x)

    came = wrap(run)(x, v)
    if over == "nested":
        x = x[:, tf.newaxis]
    x, v = (tf.broadcast_to(t, came.shape) for t in (x, v))
    close([came], [times(MODELS["number"].true, x, v)])
    # While TensorFlow traces an eager map, it evaluates what is made of small constants alone.
    runs = 2 if wrap is EXECUTED["eager"] else 1
    assert h.hess_calls == runs * (1 if vectorized else len(tf.reshape(came, [-1, 2])))


def product(p, n):
    return tf.reduce_sum(p["x"] ** 2, -1) * tf.exp(p["a"]) * tf.cast(n, tf.float64)


@WRAPS
@VECTORIZED
@pytest.mark.parametrize("shared", [[], [4]])
def test_mixed_blocks_of_structures(wrap, vectorized, shared):
    """Some parts may be shared by all members."""

    def engine(p, n):
        y, factor = np.sum(p["x"] ** 2, -1) * np.exp(p["a"]) * n, np.exp(p["a"]) * n
        return y, ({"a": y, "x": 2 * p["x"] * factor[..., None]}, None)

    def hessp(p, n, v):
        v, nothing = v
        assert nothing is None
        _, (by, _) = engine(p, n)
        factor = np.exp(p["a"]) * n
        return {
            "a": by["a"] * v["a"] + np.sum(by["x"] * v["x"], -1),
            "x": by["x"] * v["a"][..., None] + 2 * v["x"] * factor[..., None],
        }, None

    h = sgtrick.from_numpy(
        engine, event_ndims=({"a": 0, "x": 1}, 0), vectorized=vectorized, hessp=hessp
    )
    p = {"a": tf.constant(np.random.default_rng(4).normal(size=shared)), "x": tf.constant(X)}
    v = [tf.ones_like(p["a"]), tf.constant(V)]
    run = wrap(lambda f: hessian_times(f, [p, tf.constant([1, 2, 3, 4])], v))
    close(run(h), run(product))


def by_tapes(f):
    def run(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            g = derivative(f)(x)
        return outer.batch_jacobian(g, x)

    return run


def by_forward_mode(f):
    return lambda x: tf.stack([pushed(derivative(f), x, 0 * x + v) for v in np.eye(2)], -1)


def of_a_sum(f):
    of_both = by_tapes(lambda x: f(x) + tf.reduce_sum(x**2, -1))
    return lambda x: of_both(x) - 2 * tf.eye(2, dtype=x.dtype)


def of_unknown_dimensions(f):
    return tf.function(by_tapes(f), input_signature=[tf.TensorSpec([None, 2], tf.float64)])


class TestWhereTheEngineFailed:
    """Its value is replaced by a constant there, so `hessp` is the Hessian of something else."""

    X = tf.constant([[0.5, 2.0], [2.0, 3.0], [1.0, -1.0]], tf.float64)
    HESSIANS = np.array([np.diag([3.0, 12.0]), np.full([2, 2], np.nan), np.diag([6.0, -6.0])])

    @staticmethod
    def cubes(vectorized=True):
        def cubes(x):
            if np.any(x[..., 0] > 1.5):
                raise ArithmeticError
            return np.sum(x**3, -1), 3 * x**2

        return sgtrick.from_numpy(
            cubes, hessp=lambda x, v: 6 * x * v, on_error=-1e3, vectorized=vectorized
        )

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("mode", "inside", "wrap", "vectorized"),
        spread(
            [by_tapes, by_forward_mode, of_a_sum, of_unknown_dimensions],
            EXECUTED.values(), EXECUTED.values(), [True, False],
        ),
    )  # fmt: skip
    def test_second_derivatives_are_nan(self, mode, inside, wrap, vectorized):
        came = wrap(mode(inside(self.cubes(vectorized))))(self.X)
        np.testing.assert_allclose(came, self.HESSIANS, rtol=1e-6, atol=1e-6)

    @WRAPS
    def test_sums_of_rows_are_nan(self, wrap):
        came = wrap(mapped(derivative(derivative(self.cubes()))))(self.X)
        np.testing.assert_allclose(came, self.HESSIANS.sum(-1), rtol=1e-6)


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

        n = tf.constant(3)
        np.testing.assert_allclose(h(p, n), product(p, n))
        first = len(traced)
        run = wrap(lambda p, v: hessian_times(h, [p, n], v))
        close(run(p, v), hessian_times(product, [p, n], v))
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
