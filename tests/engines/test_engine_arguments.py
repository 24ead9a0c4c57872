"""The arguments of engines: shapes, structures, dtypes, defaults, and how they are passed."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import engine_functions as engines
import sgtrick
from array_model import VECTORIZED
from shared import (
    EXECUTED,
    WRAPS,
    gradient,
    pushed,
    value_and_gradients,
)

EAGER = EXECUTED["eager"]


def close(came, want):
    for a, b in zip(tf.nest.flatten(came), tf.nest.flatten(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


class TestShapes:
    @staticmethod
    def line(x, a, b):
        s = np.sum(x, -1)
        return s * a * b, (np.asarray(a * b)[..., None] * np.ones_like(x), s * b, s * a)

    SPECS = tuple(tf.TensorSpec(shape, tf.float64) for shape in ([None, 3], [None, None], []))

    @pytest.mark.parametrize(
        "wrap",
        [lambda f: f, tf.function, tf.function(input_signature=SPECS)],
        ids=["eager", "tf.function", "unknown shapes"],
    )
    @VECTORIZED
    def test_batches_are_broadcast(self, wrap, vectorized):
        h = sgtrick.from_numpy(self.line, event_ndims=(1, 0, 0), vectorized=vectorized)
        random = np.random.default_rng(0)
        args = [tf.constant(random.normal(size=s)) for s in ([4, 3], [2, 1], [])]
        want = value_and_gradients(lambda x, a, b: tf.reduce_sum(x, -1) * a * b, *args)
        close(wrap(lambda x, a, b: value_and_gradients(h, x, a, b))(*args), want)
        assert h.calls == (1 if vectorized else 8)

    @WRAPS
    def test_structures(self, wrap):
        def f(p, x):
            (mu, nu), sd = p["location"], p["scale"]
            z = (x - mu - nu) / sd
            by_mu = np.sum(z) / sd
            by_sd = np.sum(z**2) / sd
            return -0.5 * np.sum(z**2), ({"location": [by_mu, by_mu], "scale": by_sd}, -z / sd)

        def native(p, x):
            mu, nu = p["location"]
            return -0.5 * tf.reduce_sum(((x - mu[:, None] - nu) / p["scale"]) ** 2, -1)

        h = sgtrick.from_numpy(f, event_ndims=({"location": [0, 0], "scale": 0}, 1))
        random = np.random.default_rng(1)
        p = {"location": [random.normal(size=5), random.normal(size=())], "scale": np.float64(2.0)}
        p = tf.nest.map_structure(tf.constant, p)
        x = tf.constant(random.normal(size=[5, 3]))
        close(wrap(value_and_gradients)(h, p, x), value_and_gradients(native, p, x))

    def test_event_ndims_of_numpy(self):
        h = sgtrick.from_numpy(engines.normal, event_ndims=np.int64(1))
        np.testing.assert_array_equal(h(tf.ones([3, 2])), [-1, -1, -1])


class Parts(NamedTuple):
    """A vector and a number for each member."""

    x: Any
    a: Any


class TestEventNdims:
    X, A = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([10.0, 20.0])

    @staticmethod
    def f(p, scale=3.0):
        """Also of a vector `a`, so that only the value tells whether it is one."""
        x, a = (p["x"], p["a"]) if isinstance(p, dict) else p
        by_x, by_a = scale * np.sum(a) * np.ones_like(x), scale * np.sum(x) * np.ones_like(a)
        gradient = {"x": by_x, "a": by_a} if isinstance(p, dict) else (by_x, by_a)
        return scale * np.sum(x) * np.sum(a), gradient

    STRUCTURES = {
        "list": (list, [1, 0]),
        "tuple": (tuple, [1, 0]),
        "named tuple": (Parts._make, Parts(1, 0)),
        "dict": (lambda parts: dict(zip("xa", parts, strict=True)), {"x": 1, "a": 0}),
    }

    @pytest.mark.parametrize("stated", ["alone", "in a tuple"])
    @pytest.mark.parametrize("name", STRUCTURES)
    def test_of_the_parts_of_one_argument(self, name, stated):
        """Beside a default that is left out, and with a batch as large as an event."""
        make, ndims = self.STRUCTURES[name]
        h = sgtrick.from_numpy(self.f, event_ndims=ndims if stated == "alone" else (ndims, 0))
        y, (by,) = value_and_gradients(h, make([self.X, self.A]))
        np.testing.assert_allclose(y, [90, 420])
        by_x, by_a = (by["x"], by["a"]) if name == "dict" else by
        np.testing.assert_allclose(by_x, [[30, 30], [60, 60]])
        np.testing.assert_allclose(by_a, [9, 21])

    @pytest.mark.parametrize(
        ("stated", "args", "message"),
        [
            ([1, 0], [X, A], r"\[1, 0\] is the structure of one argument, but there are 2 \(p, s"),
            (
                {"x": 1},
                [{"x": X}, A],
                "one argument, but there are 2 .*Pass a tuple with one entry",
            ),
            (Parts(1, 0), [X, A], "is the structure of one argument, but there are 2"),
            ((1, 0), [[X, A]], r"p has as many parts, .* for these: then pass a list, \[1, 0\]"),
            ((1, 0), [(X, A)], "p has as many parts, and the others are left out"),
            ([1, 0, 0], [[X, A]], "the event_ndims of p must have the structure of p"),
            ((1, 0, 0), [[X, A]], r"for each of the 1 arguments \(p\), got .*of p, pass a list"),
        ],
    )
    def test_what_is_not_clear_is_an_error(self, stated, args, message):
        with pytest.raises(ValueError, match=message):
            sgtrick.from_numpy(self.f, event_ndims=stated)(*args)

    def test_one_entry_for_all_parts_of_an_argument(self):
        def f(p, scale=3.0):
            return scale * sum(map(np.sum, p)), [scale * np.ones_like(x) for x in p]

        h = sgtrick.from_numpy(f, event_ndims=(1, 0))
        np.testing.assert_allclose(h([self.X, self.X, self.X]), [27, 63])
        h = sgtrick.from_numpy(f, event_ndims=([1, 1], 0))
        np.testing.assert_allclose(h([self.X, self.X]), [18, 42])


class TestPassing:
    def test_keywords_and_methods(self):
        class Model:
            def density(self, x, sign=1.0):
                return sign * np.sum(x), np.full_like(x, sign)

        x = tf.constant([1.0, 2.0])
        assert sgtrick.from_numpy(Model().density)(x=x) == 3
        h = sgtrick.from_numpy(
            lambda x, sign: (sign * np.sum(x), (np.full_like(x, sign), np.sum(x))),
            event_ndims=(1, 0),
        )
        assert h(sign=-1.0, x=x) == -3
        with pytest.raises(TypeError, match=r"\(\) missing a required argument: 'sign'"):
            h(x)
        with pytest.raises(TypeError, match=r"keyword-only arguments \['y'\], but engines"):
            sgtrick.from_numpy(lambda x, *, y: y)(x, y=x)

    @WRAPS
    def test_defaults_that_a_call_leaves_out(self, wrap):
        def of_one(x, scale=3.0, shift=0.0):
            return scale * np.sum(x) + shift, np.full_like(x, scale)

        def of_all(x, scale=3.0, shift=0.0):
            value, by_x = of_one(x, scale, shift)
            return value, (by_x, np.sum(x), 1.0)

        x, ndims = tf.ones([2, 2]), (1, 0, 0)
        h = sgtrick.from_numpy(of_one, event_ndims=ndims)
        y, (g,) = wrap(value_and_gradients)(h, x)
        np.testing.assert_array_equal(y, [6, 6])
        np.testing.assert_array_equal(g, np.full([2, 2], 3))
        h = sgtrick.from_numpy(of_all, event_ndims=ndims)
        np.testing.assert_array_equal(wrap(lambda x: h(x, shift=1.0, scale=2.0))(x), [5, 5])
        # Also what is left out before one that is given.
        np.testing.assert_array_equal(wrap(lambda x: h(x, shift=1.0))(x), [7, 7])
        h = sgtrick.from_numpy(lambda x, mode=None, shift=0.0: shift, event_ndims=ndims)
        with pytest.raises(TypeError, match=r"with shift, which comes after the default mode=None"):
            wrap(lambda x: h(x, shift=1.0))(x)
        with pytest.raises(ValueError, match=r"one entry for each .*, got \(1, 0, 0, 0\)"):
            sgtrick.from_numpy(of_one, event_ndims=(1, 0, 0, 0))(x)

    def test_variables(self):
        v, w = tf.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])
        h = sgtrick.from_numpy(lambda x, y: (np.sum(x * y), (y, x)))
        with tf.GradientTape() as tape:
            y = h(v, w)
        by_v, by_w = tape.gradient(y, [v, w.value])
        np.testing.assert_array_equal(by_v, [3, 4])
        np.testing.assert_array_equal(by_w, [1, 2])


class TestNumbersOfPython:
    """They arrive as what they were: the engine may count with them, and compare them."""

    @VECTORIZED
    @pytest.mark.parametrize(
        ("number", "f", "want"),
        [
            (100000, lambda x, n: n**2 // 10**9, 10),
            (True, lambda x, n: n + n, 2),
            (0.1, lambda x, n: int(1.0 / n), 10),  # 9 of float32's
            ("fast", lambda x, n: 3 if n == "fast" else 30, 3),
            (2, lambda x, n: sum(1 for _ in range(n)), 2),
        ],
        ids=["int", "bool", "float", "str", "range"],
    )
    def test_arrive_as_they_are(self, vectorized, number, f, want):
        h = sgtrick.from_numpy(
            lambda x, n: (np.sum(x, -1) * f(x, n), (f(x, n) + 0 * x, None)),
            event_ndims=(1, 0),
            vectorized=vectorized,
        )
        y, (g,) = tf.function(lambda x: value_and_gradients(lambda x: h(x, number), x))(
            tf.ones([2, 3])
        )
        np.testing.assert_array_equal(y, [3 * want] * 2)
        np.testing.assert_array_equal(g, np.full([2, 3], want))

    @pytest.mark.parametrize("form", ["from_torch", "from_jax", "native"])
    def test_of_frameworks(self, form):
        pytest.importorskip(form.removeprefix("from_").replace("native", "jax.experimental.jax2tf"))
        options = {"native": True} if form == "native" else {}
        form = getattr(sgtrick, form.replace("native", "from_jax"))
        h = form(lambda x, n, flag: (x * n**2 * flag).sum(), event_ndims=(1, 0, 0), **options)
        x = tf.ones([2, 3], tf.float64)
        np.testing.assert_allclose(h(x, 100000, True), [3e10] * 2)
        np.testing.assert_array_equal(gradient(lambda x: h(x, 100000, 2.0), x)[0], [2e10] * 3)

    def test_without_any_dimensions_are_numbers(self):
        """Of arrays without dimensions, `-=` would change those that share their memory."""

        def f(u0):
            assert isinstance(u0, np.float64)
            u = u0
            u -= 0.5
            return u0, 1.0

        for vectorized in (True, False):
            h = sgtrick.from_numpy(f, event_ndims=0, vectorized=vectorized)
            assert h(tf.constant(1.0)) == 1
        np.testing.assert_array_equal(h(tf.constant([1.0, 2.0])), [1, 2])


class TestUnknownGradients:
    """Data, which `argnums` leaves out, and gradients that the engine does not know."""

    X, DATA = tf.constant([[1.0, 2.0]] * 3), tf.constant([0.0, 1.0])

    @staticmethod
    def loss(x, data):
        return np.sum((x - data) ** 2)

    ENGINES = {
        "data": lambda f: sgtrick.from_numpy(
            lambda x, data: (f(x, data), 2 * (x - data)), argnums=0,
            hessp=lambda x, d, v: 2 * v,
        ),
        "data of products": lambda f: sgtrick.from_numpy(
            f, vjp=lambda x, d, u: (2 * u * (x - d),), jvp=lambda x, d, t: 2 * (x - d) @ t,
            hessp=lambda x, d, v: (2 * v,), argnums=("x",),
        ),
        "differences": lambda f: sgtrick.from_numpy(
            f, grad="3-point", argnums="x", hessp=lambda x, d, v: 2 * v
        ),
        "unknown": lambda f: sgtrick.from_numpy(
            lambda x, data: (f(x, data), (2 * (x - data), None)),
            hessp=lambda x, d, v: (2 * v[0], None)
        ),
        "unknown of products": lambda f: sgtrick.from_numpy(
            f, vjp=lambda x, d, u: (2 * u * (x - d), None), hessp=lambda x, d, v: (2 * v[0], None)
        ),
    }  # fmt: skip

    @WRAPS
    @pytest.mark.parametrize(
        ("name", "way"),
        [
            *((name, "alone") for name in ENGINES),
            ("data", "mapped"),
            ("unknown of products", "mapped"),
            ("data of products", "around"),
            ("unknown", "around"),
        ],
    )
    def test_are_errors_when_asked_for(self, wrap, name, way):
        h = self.ENGINES[name](self.loss)
        f = {
            "alone": h,
            "mapped": lambda x, d: tf.vectorized_map(lambda x: h(x, d), x),
            "around": tf.function(h),
        }[way]
        by_x = wrap(lambda x, d: gradient(lambda x: f(x, d), x))
        np.testing.assert_allclose(by_x(self.X, self.DATA), 2 * (self.X - self.DATA), rtol=1e-6)
        message = "derivative with respect to data, " + (
            "for which its engine returned None" if "unknown" in name else "which argnums="
        )
        by_data = wrap(lambda x, d: gradient(lambda d: f(x, d), d))
        if way == "around" or (way, wrap) == ("mapped", EAGER):  # only NaN is possible
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert np.isnan(by_data(self.X, self.DATA)).any()
        else:
            with pytest.raises((LookupError, tf.errors.OpError), match=message):
                by_data(self.X, self.DATA)

    @pytest.mark.parametrize("name", ENGINES)
    def test_of_second_order_and_forward_mode(self, name):
        h, x = self.ENGINES[name](self.loss), self.X
        np.testing.assert_allclose(
            gradient(lambda x: gradient(lambda x: h(x, self.DATA), x), x), 2 + 0 * x
        )
        with pytest.raises(LookupError, match="derivative with respect to data, "):
            gradient(lambda d: gradient(lambda x: h(x, d), x), self.DATA)
        if name != "unknown of products":
            with pytest.raises((LookupError, tf.errors.OpError), match="with respect to data, "):
                pushed(lambda d: h(x, d), self.DATA, self.DATA)

    def test_within_a_map_nobody_is_asked(self):
        """So it is NaN, and what is known is not disturbed."""
        h = self.ENGINES["unknown"](self.loss)
        by_x = tf.function(lambda x, d: gradient(lambda x: h(x, d), x))
        run = tf.function(lambda x, d: tf.vectorized_map(lambda x: by_x(x, d), x))
        np.testing.assert_allclose(run(self.X, self.DATA), 2 * (self.X - self.DATA))

    @WRAPS
    def test_of_a_further_output(self, wrap):
        h = sgtrick.from_numpy(
            lambda x: ({"a": np.sum(x), "b": x[0]}, {"a": np.ones(2), "b": None}),
            value_shape={"a": (), "b": ()},
        )
        by = lambda key: wrap(lambda x: gradient(lambda x: h(x)[key], x))(self.X)  # noqa: E731
        np.testing.assert_array_equal(by("a"), np.ones([3, 2]))
        with pytest.raises((LookupError, tf.errors.OpError), match="to x, for which its engine"):
            by("b")

    def test_differences_take_no_step_in_data(self):
        def of_counts(theta, counts):
            assert np.all(counts >= 0)
            return np.sum(counts * np.log(theta) - theta)

        h = sgtrick.from_numpy(of_counts, grad="3-point", argnums="theta")
        counts = tf.constant([0.0, 2.0], tf.float64)
        g = gradient(lambda t: h(t, counts), tf.constant([1.0, 2.0], tf.float64))
        np.testing.assert_allclose(g, [-1, 0], atol=1e-8)

    def test_of_a_tensor_that_is_the_point_too(self):
        h = sgtrick.from_numpy(lambda a, b: (a @ b, b), argnums=0)
        x = self.X[0]
        np.testing.assert_allclose(gradient(lambda x: h(x, tf.stop_gradient(x)), x), x)
        with pytest.raises(LookupError, match="respect to b, which argnums=0 leaves out"):
            gradient(lambda x: h(x, x), x)

    def test_argnums_that_are_no_arguments(self):
        with pytest.raises(ValueError, match="argnums has 'y', which is no argument of this call"):
            sgtrick.from_numpy(engines.normal, argnums="y")(self.X)
        h = sgtrick.from_numpy(lambda x, a=1.0: (a, x), argnums=("x", "a"))
        with pytest.raises(ValueError, match="an argument of <lambda> that the call leaves to its"):
            h(self.X)

    @pytest.mark.parametrize("form", ["from_torch", "from_jax", "native"])
    def test_of_frameworks(self, form):
        pytest.importorskip(form.removeprefix("from_").replace("native", "jax.experimental.jax2tf"))
        options = {"native": True} if form == "native" else {}
        form = getattr(sgtrick, form.replace("native", "from_jax"))
        h = form(lambda a, x: ((x - a) ** 2).sum(), argnums=(1,), **options)
        by_x = gradient(lambda x: h(self.DATA, x), self.X)
        np.testing.assert_allclose(by_x, 2 * (self.X - self.DATA))
        second = gradient(lambda x: gradient(lambda x: h(self.DATA, x), x), self.X)
        np.testing.assert_allclose(second, 2 + 0 * self.X)
        with pytest.raises(LookupError, match=r"respect to a, which argnums=\(1,\) leaves out"):
            gradient(lambda a: h(a, self.X), self.DATA)


class TestWithoutDerivatives:
    @WRAPS
    def test_beside_others(self, wrap):
        seen = []

        def f(x, k, flag):
            seen.append((x.dtype, k.dtype, flag.dtype))
            return np.sum(x[:k]), (1.0 * (np.arange(3) < k), None, None)

        h = sgtrick.from_numpy(f, event_ndims=(1, 0, 0))
        y, (g, *rest) = wrap(value_and_gradients)(
            h, tf.constant([1.0, 2.0, 4.0]), tf.constant([1, 2]), tf.constant(True)
        )
        np.testing.assert_array_equal(y, [1, 3])
        np.testing.assert_array_equal(g, [2, 1, 0])
        assert rest == [None, None]
        assert seen[0] == (np.float64, np.int32, np.bool_)

    @WRAPS
    def test_alone(self, wrap):
        h = sgtrick.from_numpy(lambda j, k: (10.0 * j + k, None), event_ndims=0)
        np.testing.assert_array_equal(wrap(h)(tf.constant([1, 2]), tf.constant(3)), [13, 23])
        assert wrap(sgtrick.from_numpy(lambda: (2.0, None)))().numpy() == 2.0

    @pytest.mark.parametrize(
        ("text", "kind", "want"),
        [
            (tf.constant(b"ab\0"), bytes, 3),  # as it is
            (tf.constant([b"ab\0", b""]), bytes, [3, 0]),
            ("fast", str, 4),
            (np.array(["fast", ""]), str, [4, 0]),
            (np.array(["fast"])[0], str, 4),
        ],
    )
    def test_text(self, text, kind, want):
        h = sgtrick.from_numpy(
            lambda s: (len(s) if isinstance(s, kind) else np.nan, None), event_ndims=0
        )
        np.testing.assert_array_equal(tf.function(lambda: h(text))(), want)


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("of_engine", ["float32", tf.float64])
    def test_of_one_argument(self, dtype, of_engine):
        seen = []

        def f(x):
            seen.append(x.dtype)
            return engines.normal(x)

        h = sgtrick.from_numpy(f, dtype=of_engine)
        y, (g,) = tf.function(value_and_gradients)(h, tf.constant([1.0, 2.0], dtype))
        assert y.dtype == g.dtype == dtype
        assert seen == [tf.as_dtype(of_engine).as_numpy_dtype]
        np.testing.assert_array_equal(tf.cast(g, tf.float32), [-1, -2])

    @pytest.mark.parametrize(
        ("dtypes", "widest"),
        [
            ((tf.float32, tf.float64), tf.float64),
            ((tf.float16, tf.bfloat16), tf.float32),  # of which none holds the other
            ((tf.float16, tf.float32), tf.float32),
        ],
        ids=str,
    )
    def test_of_several(self, dtypes, widest):
        h = sgtrick.from_numpy(lambda x, y: (x @ y, (y, x)))
        x, y = (tf.constant([1.0, 2.0], dtype) for dtype in dtypes)
        value, gradients = value_and_gradients(h, x, y)
        assert (value.dtype, *(g.dtype for g in gradients)) == (widest, *dtypes)
        for came in (gradients[0], gradients[1]):
            np.testing.assert_array_equal(tf.cast(came, tf.float32), [1, 2])

    def test_of_numbers(self):
        """Of Python's there is none: they are read in that of the others. NumPy's have their own."""
        h = sgtrick.from_numpy(lambda x, a: (np.sum(x) * a, (0 * x + a, 3.0)), event_ndims=(1, 0))
        x = np.array([1.0, 2.0])
        assert h(x.astype("float32"), 0.1).dtype == tf.float32
        assert h(x, 0.1).numpy() == (1 + 2) * 0.1  # not float32's 0.1
        assert h(x.astype("float32"), np.float64(0.1)).dtype == tf.float64
        assert h(x.astype("float32"), np.float64(0.1)).numpy() == (1 + 2) * 0.1
        assert sgtrick.from_numpy(lambda a: (a, 1.0), event_ndims=0)(0.1).numpy() == 0.1

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
    @pytest.mark.parametrize("options", [{}, {"vectorized": True}, {"executor": True}], ids=str)
    def test_of_what_is_returned(self, dtype, options):
        dtype = tf.as_dtype(dtype).as_numpy_dtype

        def f(x):
            buffer[:] = 2 * x
            return np.sum(x**2, -1).astype(dtype), buffer

        x, buffer = np.array([[1.0, 2.0], [0.5, 0.0]]), np.zeros([2, 2], dtype)
        with ThreadPoolExecutor(1) as executor:
            options = {"executor": executor} if "executor" in options else options
            buffer = buffer if "vectorized" in options else buffer[0]
            y, (g,) = value_and_gradients(sgtrick.from_numpy(f, **options), tf.constant(x))
        np.testing.assert_array_equal(y, [5, 0.25])
        np.testing.assert_array_equal(g, 2 * x)

    def test_casts_whatever_numpy_raises(self):
        h = sgtrick.from_numpy(lambda x: (1e-300, np.full(1, 1e300)), dtype="float32")
        with np.errstate(all="raise"):
            value, (gradient,) = value_and_gradients(h, tf.constant([0.0], tf.float32))
            assert h(tf.constant([1e300], tf.float64)).dtype == tf.float64
        np.testing.assert_array_equal([value, *gradient], [0, np.inf])
