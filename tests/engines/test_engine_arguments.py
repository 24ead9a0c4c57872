"""The arguments of engines: shapes, structures, dtypes, defaults, and how they are passed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import engine_functions as engines
import sgtrick
from shared import WRAPS, value_and_gradients

RAISED = (RuntimeError, TypeError, ValueError, tf.errors.OpError)


class TestArguments:
    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_broadcast_of_batches(self, wrap, vectorized):
        def line(x, a, b):
            return np.sum(x, -1) * a * b, (
                np.broadcast_to(a * b, x.shape[::-1]).T if vectorized else np.full(x.shape, a * b),
                np.sum(x, -1) * b,
                np.sum(x, -1) * a,
            )

        if vectorized:

            def line(x, a, b):
                s = np.sum(x, -1)
                return s * a * b, ((a * b)[..., None] * np.ones_like(x), s * b, s * a)

        h = sgtrick.from_numpy(line, event_ndims=(1, 0, 0), vectorized=vectorized)
        random = np.random.default_rng(0)
        x, a, b = (tf.constant(random.normal(size=s)) for s in ([4, 3], [2, 1], []))
        y, gradients = wrap(value_and_gradients)(h, x, a, b)
        truth = value_and_gradients(lambda x, a, b: tf.reduce_sum(x, -1) * a * b, x, a, b)
        assert y.shape == [2, 4]
        assert h.calls == (1 if vectorized else 8)
        for came, want in zip((y, *gradients), (truth[0], *truth[1]), strict=True):
            np.testing.assert_allclose(came, want, rtol=1e-13)

    def test_broadcast_of_unknown_batches(self):
        h = sgtrick.from_numpy(
            lambda x, a: (np.sum(x) * a, (np.full(3, a), np.sum(x))), event_ndims=(1, 0)
        )
        specs = [tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec(None, tf.float64)]
        run = tf.function(lambda x, a: value_and_gradients(h, x, a), input_signature=specs)
        x, a = tf.ones([4, 3], tf.float64), tf.constant([[2.0], [5.0]], tf.float64)
        y, (by_x, by_a) = run(x, a)
        np.testing.assert_array_equal(y, [[6] * 4, [15] * 4])
        np.testing.assert_array_equal(by_x, np.full([4, 3], 7))
        np.testing.assert_array_equal(by_a, [[12], [12]])

    @WRAPS
    def test_structures(self, wrap):
        def f(p, x):
            (mu, nu), sd = p["location"], p["scale"]
            z = (x - mu - nu) / sd
            by_mu = np.sum(z) / sd
            by_sd = np.sum(z**2) / sd
            return -0.5 * np.sum(z**2), ({"location": [by_mu, by_mu], "scale": by_sd}, -z / sd)

        h = sgtrick.from_numpy(f, event_ndims=({"location": [0, 0], "scale": 0}, 1))
        random = np.random.default_rng(1)
        p = {"location": [random.normal(size=5), random.normal(size=())], "scale": np.float64(2.0)}
        p = tf.nest.map_structure(tf.constant, p)
        x = tf.constant(random.normal(size=[5, 3]))

        def native(p, x):
            mu, nu = p["location"]
            return -0.5 * tf.reduce_sum(((x - mu[:, None] - nu) / p["scale"]) ** 2, -1)

        came = tf.nest.flatten(wrap(value_and_gradients)(h, p, x))
        for a, b in zip(came, tf.nest.flatten(value_and_gradients(native, p, x)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)

    @WRAPS
    def test_keywords_defaults_and_methods(self, wrap):
        class Model:
            def density(self, x, sign=1.0):
                return sign * np.sum(x), np.full_like(x, sign)

        h = sgtrick.from_numpy(Model().density)
        x = tf.constant([1.0, 2.0])
        assert wrap(lambda x: h(x=x))(x) == 3
        h = sgtrick.from_numpy(
            lambda x, sign: (sign * np.sum(x), (np.full_like(x, sign), np.sum(x))),
            event_ndims=(1, 0),
        )
        assert wrap(lambda x: h(sign=-1.0, x=x))(x) == -3
        with pytest.raises(TypeError, match=r"\(\) missing a required argument: 'sign'"):
            h(x)
        h = sgtrick.from_numpy(
            lambda x, a=2.0, b=3.0: (x * a * b, (a * b, None, None)), event_ndims=0
        )
        assert wrap(lambda x: h(x, b=5.0))(x[0]) == 10  # also what is left out before b
        with pytest.raises(TypeError, match=r"keyword-only arguments \['y'\], but engines"):
            sgtrick.from_numpy(lambda x, *, y: y)(x, y=x)

    @WRAPS
    def test_what_has_no_derivatives(self, wrap):
        seen = []

        def f(x, k, flag):
            seen.append((x.dtype, k.dtype, flag.dtype))
            return np.sum(x[:k]), (np.arange(3) < k, None, None)

        def ok(x, k, flag):
            value, (gx, *rest) = f(x, k, flag)
            return value, (gx.astype(float), *rest)

        h = sgtrick.from_numpy(ok, event_ndims=(1, 0, 0))
        y, (g, *rest) = wrap(value_and_gradients)(
            h, tf.constant([1.0, 2.0, 4.0]), tf.constant([1, 2]), tf.constant(True)
        )
        np.testing.assert_array_equal(y, [1, 3])
        np.testing.assert_array_equal(g, [2, 1, 0])
        assert rest == [None, None]
        assert seen[0] == (np.float64, np.int32, np.bool_)
        h = sgtrick.from_numpy(f, event_ndims=(1, 0, 0))
        with pytest.raises(
            RAISED, match="the gradient of f with respect to x must be real numbers, got ndarray"
        ):
            wrap(h)(tf.zeros([3]), tf.constant(1), tf.constant(True))

    @WRAPS
    def test_nothing_has_derivatives(self, wrap):
        h = sgtrick.from_numpy(lambda j, k: (10.0 * j + k, None), event_ndims=0)
        np.testing.assert_array_equal(wrap(h)(tf.constant([1, 2]), tf.constant(3)), [13, 23])

    @WRAPS
    def test_none_at_all(self, wrap):
        h = sgtrick.from_numpy(lambda: (2.0, None))
        assert wrap(h)().numpy() == 2.0

    @WRAPS
    def test_a_gradient_that_is_not_known_is_nan_for_whoever_asks(self, wrap):
        def loss(x, data):
            return np.sum((x - data) ** 2), (2 * (x - data), None)

        h = sgtrick.from_numpy(loss)
        x, data = tf.constant([1.0, 2.0]), tf.constant([0.0, 0.0])
        y, (by_x, by_data) = wrap(value_and_gradients)(h, x, data)
        assert y == 5
        np.testing.assert_array_equal(by_x, [2, 4])
        assert np.isnan(by_data).all()

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("of_engine", ["float32", "float64", tf.float64])
    @WRAPS
    def test_dtypes(self, wrap, dtype, of_engine):
        seen = []

        def f(x):
            seen.append(x.dtype)
            return engines.normal(x)

        h = sgtrick.from_numpy(f, dtype=of_engine)
        y, (g,) = wrap(value_and_gradients)(h, tf.constant([1.0, 2.0], dtype))
        assert y.dtype == g.dtype == dtype
        assert seen == [tf.as_dtype(of_engine).as_numpy_dtype]
        np.testing.assert_array_equal(tf.cast(g, tf.float32), [-1, -2])

    def test_several_dtypes_and_bare_numbers(self):
        def f(x, a):
            return np.sum(x) * a, (np.full(2, a), np.sum(x))

        h = sgtrick.from_numpy(f, event_ndims=(1, 0))
        x, a = tf.constant([1.0, 2.0]), tf.constant(3.0, tf.float64)
        y, (by_x, by_a) = value_and_gradients(h, x, a)
        assert (y.dtype, by_x.dtype, by_a.dtype) == (tf.float64, tf.float32, tf.float64)
        assert h(x, 0.1).dtype == tf.float32
        assert h(np.array([1.0, 2.0]), 0.1).numpy() == (1 + 2) * 0.1  # not float32's 0.1
        assert sgtrick.from_numpy(lambda a: (a, 1.0), event_ndims=0)(0.1).numpy() == 0.1

    def test_a_number_of_numpy_has_a_dtype(self):
        h = sgtrick.from_numpy(engines.two, event_ndims=(2, 0))
        x = tf.ones([2, 2])
        y, (by_x, by_y) = value_and_gradients(h, x, tf.constant(0.1, tf.float64))
        assert h(x, np.float64(0.1)) == y
        assert (y.dtype, by_x.dtype, by_y.dtype) == (tf.float64, tf.float32, tf.float64)

    def test_two_dtypes_of_which_none_holds_the_other(self):
        h = sgtrick.from_numpy(lambda x, y: (x @ y, (y, x)))
        x, y = tf.constant([1.0, 2.0], tf.float16), tf.constant([3.0, 4.0], tf.bfloat16)
        value, (by_x, by_y) = value_and_gradients(h, x, y)
        assert (value.dtype, by_x.dtype, by_y.dtype) == (tf.float32, tf.float16, tf.bfloat16)
        np.testing.assert_array_equal(value, 11)
        np.testing.assert_array_equal(tf.cast(by_y, tf.float32), [1, 2])

    @WRAPS
    @pytest.mark.parametrize("text", [b"ab\0", [b"ab\0", b""]], ids=["one", "batch"])
    def test_strings_as_they_are(self, wrap, text):
        h = sgtrick.from_numpy(lambda s: (len(s.item()), None), event_ndims=0)
        np.testing.assert_array_equal(wrap(h)(tf.constant(text)), [3, 0] if len(text) == 2 else 3)

    def test_casts_whatever_numpy_raises(self):
        h = sgtrick.from_numpy(lambda x: (1e-300, np.full(1, 1e300)), dtype="float32")
        with np.errstate(all="raise"):
            value, (gradient,) = value_and_gradients(h, tf.constant([0.0], tf.float32))
            assert h(tf.constant([1e300], tf.float64)).dtype == tf.float64
        np.testing.assert_array_equal([value, *gradient], [0, np.inf])

    def test_variables(self):
        v, w = tf.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])
        h = sgtrick.from_numpy(lambda x, y: (np.sum(x * y), (y, x)))
        with tf.GradientTape() as tape:
            y = h(v, w)
        by_v, by_w = tape.gradient(y, [v, w.value])
        np.testing.assert_array_equal(by_v, [3, 4])
        np.testing.assert_array_equal(by_w, [1, 2])

    def test_values_and_gradients_that_are_not_finite(self):
        def f(x):
            return (-np.inf, np.full_like(x, np.nan)) if x[0] > 1 else (x[0], np.ones_like(x))

        for wrap in (lambda f: f, tf.function):
            y, (g,) = wrap(value_and_gradients)(sgtrick.from_numpy(f), tf.constant([[2.0], [0.5]]))
            np.testing.assert_array_equal(y, [-np.inf, 0.5])
            assert g[1] == 1
