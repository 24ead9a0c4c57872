"""The contract of `from_numpy`."""

import gc
import re
import threading
import time
import warnings
import weakref
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from tensorflow.python.autograph.pyct import transpiler

import engines
import sgtrick
import sgtrick._host.from_numpy
from matrix import CELLS, Case, judge, pairs, promised
from matrix import functions as fn
from matrix.values import MATRICES, NUMBERS, POINTS
from shared import derivative

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
RAISED = (RuntimeError, TypeError, ValueError, tf.errors.OpError)

CANNOT_COMPILE = (NotImplementedError, "calls the host, which XLA cannot compile")
CANNOT_STORE = (AssertionError, "A host engine .* cannot be stored in a SavedModel")
CANNOT = {name: CANNOT_COMPILE for name in CELLS if name.endswith("XLA")} | {
    "SavedModel with custom gradients": CANNOT_STORE,
    "SavedModel without custom gradients": CANNOT_STORE,
    "TFLite, the value": (Exception, "PyFunc"),
}

engine = sgtrick.from_numpy(engines.scalar)
engine_with_hessian = sgtrick.from_numpy(
    engines.scalar, hess=lambda x: fn.scalar_hessian(tf.constant(x)).numpy()
)
engine_of_two = sgtrick.from_numpy(
    lambda both: (lambda y, g: (y, dict(zip("xy", g, strict=True))))(
        *engines.two(both["x"], both["y"])
    ),
    event_ndims={"x": 2, "y": 0},
    vectorized=True,
)
CASES = [
    Case("engine", fn.scalar, engine, (POINTS,), order=1),
    Case("engine with a Hessian", fn.scalar, engine_with_hessian, (POINTS,), order=2),
    Case(
        "vectorized engine of a dict",
        fn.two,
        lambda x, y: engine_of_two({"x": x, "y": y}),
        (MATRICES, NUMBERS),
        order=1,
    ),
]
IDS = {"ids": lambda of: getattr(of, "name", None)}
PAIRS = pairs(CASES, everywhere={"engine"})


@pytest.mark.parametrize(("case", "cell"), [p for p in PAIRS if p[1].name not in CANNOT], **IDS)
def test_matrix(case, cell):
    assert judge(cell, case) in promised(cell, case)


@pytest.mark.parametrize("cell", [CELLS[name] for name in CANNOT], **IDS)
@pytest.mark.parametrize("case", CASES[:1], **IDS)
def test_matrix_refused(case, cell):
    error, match = CANNOT[cell.name]
    before = engine.calls
    with pytest.raises(error, match=match):
        cell.run(case.form, cell.problem(case))
    assert engine.calls == before


def test_functions_traced_before_they_are_compiled_are_refused_by_xla():
    inner = tf.function(engine)
    inner(tf.constant(POINTS))
    with pytest.raises(tf.errors.InvalidArgumentError, match="scalar/host_call"):
        tf.function(inner, jit_compile=True)(tf.constant(POINTS))


def test_concrete_functions_cannot_be_stored_either(tmp_path):
    concrete = tf.function(engine).get_concrete_function(tf.TensorSpec([4, 3], tf.float64))
    with pytest.raises(*CANNOT_STORE[:1], match=CANNOT_STORE[1]):
        tf.saved_model.save(tf.Module(), str(tmp_path), signatures=concrete)


def value_and_gradients(h, *args):
    """Values, and the gradients of their sum."""
    with tf.GradientTape() as tape:
        tape.watch([a for a in tf.nest.flatten(args) if tf.is_tensor(a) and a.dtype.is_floating])
        y = h(*args)
    return y, tape.gradient(y, args)


class TestCalls:
    """How often the engine is called, and with what."""

    # Batch members times evaluations; one more evaluation where the forward is computed again.
    @pytest.mark.parametrize(
        ("name", "evaluations"),
        [
            ("eager tape", 1),
            ("persistent tape, asked twice", 1),
            ("tape in `tf.function`", 1),
            ("tape around `tf.function`", 1),
            ("unknown dimensions", 1),
            ("TF1 graph, `tf.gradients`", 1),
            ("`tape.jacobian`", 1),
            ("`tape.batch_jacobian`", 1),
            ("tape around `vectorized_map`", 1),
            ("`vectorized_map` around a tape", 1),
            ("`tf.map_fn`", 1),
            ("`tf.scan`", 1),
            ("`tf.while_loop`", 3),
            ("`ForwardAccumulator` in eager", 1),
            ("`ForwardAccumulator` in `tf.function`", 1),
            ("`tf.recompute_grad`", 2),
            ("`MirroredStrategy` in `tf.function`", 1),
        ],
    )
    def test_one_gives_value_and_gradient(self, name, evaluations):
        before = engine.calls
        CELLS[name].run(engine, CELLS[name].problem(CASES[0]))
        assert engine.calls - before == evaluations * len(POINTS)

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_shapes_and_number(self, wrap, vectorized):
        seen = []

        @sgtrick.from_numpy
        def one(x):
            seen.append(x.shape)
            return np.sum(x), np.ones_like(x)

        def many(x):
            seen.append(x.shape)
            return np.sum(x, -1), np.ones_like(x)

        h = sgtrick.from_numpy(many, vectorized=True) if vectorized else one
        assert wrap(h)(tf.ones([2, 3, 5])).shape == [2, 3]
        assert seen == ([(2, 3, 5)] if vectorized else [(5,)] * 6)
        assert h.calls == len(seen)
        assert h.failures == 0
        assert wrap(h)(tf.ones([5])).shape == []
        assert seen[-1] == (5,)

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_no_members_no_call(self, wrap, vectorized):
        h = sgtrick.from_numpy(engines.normal, vectorized=vectorized)
        y, (g,) = wrap(value_and_gradients)(h, tf.zeros([3, 0, 5]))
        assert (y.shape, g.shape, h.calls) == ([3, 0], [3, 0, 5], 0)

    @WRAPS
    def test_empty_events_are_calls(self, wrap):
        h = sgtrick.from_numpy(engines.normal)
        np.testing.assert_array_equal(wrap(h)(tf.zeros([2, 0])), [0, 0])
        assert h.calls == 2

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_the_engine_may_change_and_keep_its_arrays(self, wrap, vectorized):
        kept = []

        def hostile(x):
            kept.append(x)
            value = np.sum(x**2, -1)
            x *= 2  # also the gradient, and its buffer
            return value, x

        h = sgtrick.from_numpy(hostile, vectorized=vectorized)
        x = tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64)
        y, (g,) = wrap(value_and_gradients)(h, x)
        np.testing.assert_array_equal(np.reshape(kept, [2, 2]), [[2, 4], [6, 8]])
        for array in kept:
            array[:] = np.nan
        np.testing.assert_array_equal(x, [[1, 2], [3, 4]])
        np.testing.assert_array_equal(y, [5, 25])
        np.testing.assert_array_equal(g, [[2, 4], [6, 8]])

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_the_engine_may_return_the_same_buffers_each_time(self, wrap, vectorized):
        # TensorFlow takes over what begins at a multiple of 64 bytes, and copies the rest.
        room = np.zeros(24)
        aligned = room[-room.ctypes.data % 64 // 8 :]
        value = aligned[: 1 + vectorized].reshape([2][: int(vectorized)])
        gradient = aligned[8 : 10 + 2 * vectorized].reshape([2, 2][not vectorized :])

        def frugal(x):
            np.sum(x**2, -1, out=value)
            np.multiply(x, 2, out=gradient)
            return value, gradient

        h = sgtrick.from_numpy(frugal, vectorized=vectorized)
        x = tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64)
        y, (g,) = wrap(value_and_gradients)(lambda x: h(x) + h(3 * x), x)
        value[...] = gradient[...] = np.nan
        np.testing.assert_array_equal(y, [50, 250])
        np.testing.assert_array_equal(g, 20 * x)

    @pytest.mark.parametrize("name", ["_private", "größe", "β", "__", "1", "a b/c", "<lambda>"])
    def test_any_name_will_do_in_graphs(self, name):
        h = sgtrick.from_numpy(engines.normal, name=name)
        np.testing.assert_array_equal(tf.function(h)(tf.ones([2])), -1)

    def test_graphs_that_nobody_holds_are_freed(self):
        h = sgtrick.from_numpy(lambda k: (float(k), None), event_ndims=0)
        graph = tf.function(h).get_concrete_function(tf.TensorSpec([], tf.int32)).graph
        alive = weakref.ref(graph)
        del graph
        gc.collect()
        assert alive() is None

    def test_eight_threads(self):
        inside, together = threading.Semaphore(1), []

        def jealous(x):
            together.append(not inside.acquire(blocking=False))
            value = engines.normal(x)
            if not together[-1]:
                inside.release()
            if x[0] < 0:
                raise ArithmeticError("no")
            return value

        h = sgtrick.from_numpy(jealous, on_error=-np.inf)
        graph = tf.function(h)
        points = np.random.default_rng(0).normal(size=(1000, 3))
        values = np.zeros(1000)

        def work(k):
            for i in range(k, 1000, 8):
                values[i] = (graph if i % 3 else h)(tf.constant(points[i]))

        begin = time.perf_counter()
        workers = [threading.Thread(target=work, args=[k]) for k in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        elapsed = time.perf_counter() - begin
        negative = points[:, 0] < 0
        assert (h.calls, h.failures) == (1000, negative.sum())
        assert not any(together)
        np.testing.assert_allclose(
            values, np.where(negative, -np.inf, -0.5 * (points**2).sum(-1)), rtol=1e-14
        )
        assert 0 < h.seconds < elapsed  # since no two were together


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


class TestGradientFunction:
    @WRAPS
    def test_value_and_gradient_apart(self, wrap):
        calls = []

        def value(x):
            x *= x  # must not be seen by the gradient
            return np.sum(x)

        def gradient(x):
            calls.append(x)
            return 2 * x

        h = sgtrick.from_numpy(value, grad=gradient)
        x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
        y, (g,) = wrap(value_and_gradients)(h, x)
        np.testing.assert_array_equal(y, [5, 25])
        np.testing.assert_array_equal(g, 2 * x)
        assert h.calls == len(calls) == 2


class TestAux:
    @WRAPS
    @pytest.mark.parametrize("apart", [True, False])
    def test_aux(self, wrap, apart):
        def with_aux(x):
            return np.sum(x**2), np.stack([x, 2 * x])

        def f(x):
            return with_aux(x), 2 * x

        h = (
            sgtrick.from_numpy(with_aux, grad=lambda x: 2 * x, has_aux=True)
            if apart
            else sgtrick.from_numpy(f, has_aux=True)
        )

        @wrap
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y, aux = h(x)
            return y, aux, tape.gradient(y, x)

        x = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        y, aux, g = run(x)
        np.testing.assert_array_equal(y, tf.reduce_sum(x**2, -1))
        np.testing.assert_array_equal(aux, tf.stack([x, 2 * x], 1))
        assert aux.dtype == tf.float64
        np.testing.assert_array_equal(g, 2 * x)
        assert run(tf.zeros([0, 2]))[1].shape == [0]

    def test_aux_of_a_vectorized_engine(self):
        h = sgtrick.from_numpy(
            lambda x: ((np.sum(x, -1), 2 * x), np.ones_like(x)), has_aux=True, vectorized=True
        )
        y, aux = h(tf.ones([3, 2]))
        assert y.shape == [3]
        np.testing.assert_array_equal(aux, 2 * np.ones([3, 2]))

    @WRAPS
    def test_aux_where_the_engine_fails(self, wrap):
        def f(x):
            value, gradient = engines.fails_beyond_one(x)
            return (value, x), gradient

        h = sgtrick.from_numpy(f, has_aux=True, on_error=-np.inf)
        y, aux = wrap(h)(tf.constant([[2.0, 0.0], [0.0, 1.0]]))
        np.testing.assert_array_equal(y, [-np.inf, -0.5])
        np.testing.assert_array_equal(aux, [[np.nan, np.nan], [0, 1]])
        _, aux = wrap(h)(tf.constant([[2.0, 0.0], [0.0, 3.0]]))
        np.testing.assert_array_equal(aux, [np.nan, np.nan])  # of a shape that nobody knows

    @WRAPS
    def test_aux_of_a_vectorized_engine_that_fails(self, wrap):
        def f(x):
            raise ArithmeticError

        h = sgtrick.from_numpy(f, has_aux=True, on_error=-np.inf, vectorized=True)
        y, aux = wrap(h)(tf.zeros([2, 3]))
        np.testing.assert_array_equal(y, [-np.inf, -np.inf])
        assert aux.shape == [2]
        np.testing.assert_array_equal(aux, [np.nan, np.nan])

    @pytest.mark.parametrize("returned", [1.0, (1.0, 2.0, 3.0), None])
    def test_no_aux(self, returned):
        h = sgtrick.from_numpy(lambda x: (returned, x), has_aux=True, name="f")
        message = r"f must return \(\(value, aux\), gradient\), got .* in place of \(value, aux\)"
        with pytest.raises(TypeError, match=message):
            h(tf.ones([2]))

    def test_aux_of_a_vectorized_engine_without_its_batch(self):
        h = sgtrick.from_numpy(
            lambda x: ((np.sum(x, -1), np.ones(7)), x), has_aux=True, vectorized=True, name="f"
        )
        message = r"aux of f must have the batch shape \[3\] in front, got \[7\]"
        with pytest.raises(ValueError, match=message):
            h(tf.ones([3, 2]))

    def test_aux_of_different_shapes(self):
        h = sgtrick.from_numpy(lambda x: ((x[0], x[: int(x[0])]), x), has_aux=True)
        with pytest.raises(
            ValueError,
            match=r"aux of <lambda> must have the same shape for all members .*got \[1\] and \[2\]",
        ):
            h(tf.constant([[1.0, 0.0], [2.0, 0.0]]))


class TestErrors:
    @WRAPS
    def test_the_message_of_the_engine_and_its_input(self, wrap):
        h = sgtrick.from_numpy(engines.fails_beyond_one)
        match = (
            r"(?s)fails_beyond_one raised ArithmeticError: no solution at 0\.1.*x = \[0\.1, 2\. \]"
        )
        with pytest.raises((RuntimeError, tf.errors.UnknownError), match=match) as caught:
            wrap(h)(tf.constant([[0.5, 0.5], [0.1, 2.0]], tf.float64))
        assert (h.calls, h.failures) == (2, 1)
        if isinstance(caught.value, RuntimeError):
            assert isinstance(caught.value.__cause__, ArithmeticError)

    @WRAPS
    def test_the_input_as_it_was_before_the_engine_changed_it(self, wrap):
        def engine(x):
            x *= 2
            raise ArithmeticError

        with pytest.raises((RuntimeError, tf.errors.UnknownError), match=r"x = \[1\., 2\.\]"):
            wrap(sgtrick.from_numpy(engine))(tf.constant([1.0, 2.0]))

    @WRAPS
    def test_a_number_in_the_place_of_failures(self, wrap):
        h = sgtrick.from_numpy(engines.fails_beyond_one, on_error=-np.inf)
        y, (g,) = wrap(value_and_gradients)(h, tf.constant([[2.0, 0.0], [0.0, 1.0]]))
        np.testing.assert_array_equal(y, [-np.inf, -0.5])
        np.testing.assert_array_equal(g, [[0, 0], [0, -1]])
        assert (h.calls, h.failures) == (2, 1)

    def test_the_first_that_is_replaced_is_reported(self):
        h = sgtrick.from_numpy(engines.fails_beyond_one, on_error=-np.inf)
        told = r"(?s)on_error replaces the first failure\..*fails_beyond_one raised .*x = \[2"
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            h(tf.constant([[2.0, 0.0], [3.0, 1.0]]))
            h(tf.constant([4.0, 0.0]))
        assert [w.category for w in found] == [RuntimeWarning]
        assert re.match(told, str(found[0].message))
        assert h.failures == 3

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    @pytest.mark.parametrize("error", [NameError, AttributeError, ImportError, SyntaxError])
    def test_mistakes_in_the_code_are_not_replaced(self, wrap, error, vectorized):
        def engine(x):
            raise error("a mistake")

        h = sgtrick.from_numpy(engine, on_error=-np.inf, vectorized=vectorized)
        with pytest.raises(RAISED, match=f"engine raised {error.__name__}: a mistake"):
            wrap(h)(tf.ones([2, 2]))

    @WRAPS
    @pytest.mark.parametrize("given", ["grad", "hessp", "hess"])
    def test_functions_of_other_arguments_are_not_replaced(self, wrap, given):
        def fn(x):
            value = np.sum(x)
            return value if given == "grad" else (value, np.ones_like(x))

        def other(a, b, c):
            raise AssertionError

        h = sgtrick.from_numpy(fn, **{given: other}, on_error=-np.inf)
        number = 2 if given == "hessp" else 1
        what = "fn" if given == "grad" else f"{given} of fn"
        message = (
            rf"{what} is called with {number} arguments by position, but other\(a, b, c\) does"
        )
        with pytest.raises((TypeError, *RAISED), match=message):
            wrap(h if given == "grad" else derivative(derivative(h)))(tf.ones([2]))

    @WRAPS
    def test_an_executor_of_the_engine_that_is_lost_is_its_failure(self, wrap):
        def engine(x):
            raise futures.BrokenExecutor("workers of its own")

        y = wrap(sgtrick.from_numpy(engine, on_error=-np.inf))(tf.ones([2]))
        np.testing.assert_array_equal(y, -np.inf)
        with pytest.raises(RAISED, match=r"(?s)engine raised BrokenExecutor: workers of.*x = "):
            wrap(sgtrick.from_numpy(engine))(tf.ones([2]))

    @WRAPS
    def test_a_vectorized_engine_is_asked_again_for_each_member(self, wrap):
        seen = []

        def engine(x, a):
            seen.append((x.shape, a.shape))
            if np.any(x > 1):
                x[:] = np.nan  # what fails may have changed its arguments
                raise ArithmeticError
            return a * np.sum(x, -1), (a[..., None] + 0 * x, np.sum(x, -1))

        h = sgtrick.from_numpy(engine, event_ndims=(1, 0), on_error=7, vectorized=True)
        x = tf.constant([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0], [0.0, 3.0]])
        y, (by_x, by_a) = wrap(value_and_gradients)(h, x, tf.constant(2.0))
        np.testing.assert_array_equal(y, [7, 2, 1, 7])
        np.testing.assert_array_equal(by_x, [[0, 0], [2, 2], [2, 2], [0, 0]])
        np.testing.assert_array_equal(by_a, 1.5)
        assert seen == [((4, 2), (4,))] + [((1, 2), (1,))] * 4
        assert (h.calls, h.failures) == (5, 2)
        np.testing.assert_array_equal(wrap(h)(x[0], tf.constant(2.0)), 7)
        assert (h.calls, h.failures) == (6, 3)  # of one member there is nothing to find out

    @pytest.mark.parametrize("on_error", ["raise", -np.inf])
    def test_a_vectorized_engine_gets_its_own_dtype_each_time(self, on_error):
        """And is asked again only if that is of use."""
        seen = []

        def engine(x):
            seen.append(x.dtype)
            x[:] = np.nan
            raise ArithmeticError

        h = sgtrick.from_numpy(engine, vectorized=True, on_error=on_error)
        x = tf.ones([2, 2], tf.float32)
        if on_error == "raise":
            with pytest.raises(RuntimeError, match="ArithmeticError"):
                h(x)
            assert (h.calls, h.failures, h.nonfinite) == (1, 1, 0)
        else:
            np.testing.assert_array_equal(h(x), [-np.inf, -np.inf])
            assert (h.calls, h.failures, h.nonfinite) == (3, 2, 0)
        assert set(seen) == {np.dtype("float64")}
        np.testing.assert_array_equal(x, tf.ones([2, 2]))

    def test_a_vectorized_engine_that_fails_for_none_alone(self):
        def engine(x):
            if len(x) > 1:
                raise MemoryError
            return np.sum(x, -1), np.ones_like(x)

        h = sgtrick.from_numpy(engine, on_error=-np.inf, vectorized=True)
        np.testing.assert_array_equal(h(tf.ones([3, 2])), [2, 2, 2])
        assert (h.calls, h.failures) == (4, 0)

    @WRAPS
    @pytest.mark.parametrize("on_error", ["raise", -np.inf])
    @pytest.mark.parametrize(
        ("reply", "message"),
        [
            (
                1.0,
                r"must return \(value, gradient\), got float 1\.0, a value without a gradient\. .*grad=.*from_torch or from_jax",
            ),
            (np.ones(2), r"got ndarray of shape \[2\] and dtype float64, a value without"),
            ((1.0, None), r"got tuple \(float 1\.0, None\), a value without"),
            (None, r"got None"),
            ((1.0, [1.0], 2.0), r"got tuple \(float 1\.0, list \(float 1\.0\), float 2\.0\)"),
            (
                (np.ones([1, 2]), np.ones(2)),
                r"the value of f must have the shape \[\], got \[1, 2\]",
            ),
            ((1.0, np.ones(3)), r"f with respect to x must have the shape \[2\], got \[3\]"),
            ((1.0, 1.0), r"gradient of f with respect to x must have the shape \[2\], got \[\]"),
            ((1j, np.ones(2)), r"the value of f must be real numbers, got complex 1j"),
            ((True, np.ones(2)), r"the value of f must be real numbers, got bool True"),
            (("a", np.ones(2)), r"the value of f must be real numbers, got str 'a'"),
            ((1.0, ["a", "b"]), r"the gradient of f with respect to x must be real numbers"),
            ((1.0, [[1.0], [1.0, 2.0]]), r"of f with respect to x must be (an array of )?real"),
        ],
    )
    def test_wrong_replies(self, wrap, on_error, reply, message):
        def f(x):
            return reply

        h = sgtrick.from_numpy(f, on_error=on_error)
        with pytest.raises(RAISED, match=f"(?s){message}"):
            wrap(h)(tf.zeros([2]))
        assert h.failures == 0

    @pytest.mark.parametrize(
        ("gradient", "message"),
        [
            ((1.0,), r"must be a tuple of 2, got tuple \(float 1\.0\)"),
            (1.0, r"must be a tuple of 2, got float 1\.0"),
            (
                ({"a": 1.0}, 1.0),
                r"the gradient of f\[0\] must be a dict of \['a', 'b'\], got a dict of \['a'\]",
            ),
            (({"a": 1.0, "b": (1.0,)}, 1.0), r"the gradient of f\[0\]\['b'\] must be a tuple of 2"),
            (
                ({"a": 1.0, "b": (1.0, np.ones(2))}, 1.0),
                r"of f with respect to p\['b'\]\[1\] must have the shape \[\], got \[2\]",
            ),
            (({"a": 1.0, "b": (1.0, 1.0)}, None, 1.0), r"must be a tuple of 2"),
            (
                ({"a": 1.0, "b": (1.0, 1.0)}, 3.0),
                r"respect to k must be None, got float 3\.0: k has a dtype without derivatives",
            ),
        ],
    )
    def test_wrong_structures(self, gradient, message):
        def f(p, k):
            return 1.0, gradient

        h = sgtrick.from_numpy(f, event_ndims=0)
        with pytest.raises((TypeError, ValueError), match=message):
            h({"a": tf.constant(1.0), "b": (tf.constant(1.0), tf.constant(1.0))}, tf.constant(1))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            (
                {"dtype": "complex128"},
                TypeError,
                "dtype must be a real floating dtype such as 'float64', got 'complex128'",
            ),
            ({"dtype": int}, TypeError, "got <class 'int'>"),
            ({"dtype": "no"}, TypeError, "got 'no'"),
            ({"dtype": None}, TypeError, "dtype must be .* got None"),
            ({"on_error": np.complex64(1j)}, ValueError, "on_error must be .* got .*1j"),
            (
                {"on_error": "ignore"},
                ValueError,
                "on_error must be 'raise' or a number such as -np.inf, got 'ignore'",
            ),
            ({"on_error": None}, ValueError, "got None"),
            ({"executor": 4}, TypeError, "executor must be a concurrent.futures.Executor, .*got 4"),
            ({"grad": 4}, TypeError, "grad must be a function, got int"),
            ({"hessp": 4}, TypeError, "hessp must be a function, got int"),
            ({"hess": np.eye(2)}, TypeError, "hess must be a function, got ndarray"),
        ],
    )
    def test_options(self, options, error, message):
        with pytest.raises(error, match=message):
            sgtrick.from_numpy(engines.normal, **options)

    @pytest.mark.parametrize(
        ("event_ndims", "args", "message"),
        [
            (-1, [np.ones(2)], "event_ndims must be a non-negative int.* got -1 for x"),
            ("a", [np.ones(2)], "got 'a' for x"),
            (
                (1, 1),
                [np.ones(2)],
                r"event_ndims must .* one entry for each of the 1 arguments \(x\), got \(1, 1\)",
            ),
            (
                2,
                [np.ones(2)],
                r"x has shape \[2\], but the engine is declared to take arrays of 2 dimensions",
            ),
            (
                1,
                [[1.0, 2.0]],
                r"x\[0\] has shape \[\], but the engine .* 1 dimension, event_ndims=1.* a list is a structure",
            ),
            ({"a": 1}, [{"b": np.ones(2)}], "the event_ndims of x must have the structure of x"),
        ],
    )
    def test_event_ndims(self, event_ndims, args, message):
        h = sgtrick.from_numpy(engines.normal, event_ndims=event_ndims)
        with pytest.raises(ValueError, match=message):
            h(*args)

    def test_event_ndims_of_numpy(self):
        h = sgtrick.from_numpy(engines.normal, event_ndims=np.int64(1))
        np.testing.assert_array_equal(h(tf.ones([3, 2])), [-1, -1, -1])

    def test_event_ndims_of_an_unknown_rank(self):
        run = tf.function(sgtrick.from_numpy(engines.normal), input_signature=[tf.TensorSpec(None)])
        with pytest.raises(
            tf.errors.OpError, match=r"x has shape \[\], but the engine is declared"
        ):
            run(1.0)

    @WRAPS
    def test_batches_that_do_not_broadcast(self, wrap):
        h = sgtrick.from_numpy(engines.two, event_ndims=(2, 0))
        message = r"x \[3, 2, 2\], y \[4\] have batch shapes that do not broadcast, with event_ndims=\[2, 0\]"
        with pytest.raises(ValueError, match=message):
            wrap(h)(tf.zeros([3, 2, 2]), tf.zeros([4]))

    def test_unknown_ranks_of_several_arguments(self):
        h = sgtrick.from_numpy(lambda x, k: (np.sum(x) * k, (x, None)), event_ndims=(2, 0))
        graph = tf.function(h, input_signature=[tf.TensorSpec(None), tf.TensorSpec(None, tf.int32)])
        x, k = tf.ones([2, 3, 3]), tf.constant([1, 2])
        np.testing.assert_array_equal(graph(x, k), [9, 18])
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="event_ndims=2, but x has fewer dimensions"
        ):
            graph(tf.ones([3]), tf.ones([5], tf.int32))
        assert h.calls == 2

    def test_complex_and_inconvertible_arguments(self):
        h = sgtrick.from_numpy(engines.normal)
        with pytest.raises(TypeError, match=r"x is complex \(complex64\).* two arguments"):
            h(tf.zeros([2], tf.complex64))
        with pytest.raises(TypeError, match="x must be a tensor, variable, array or number"):
            h(object())


class TestNonfinite:
    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_points_are_counted(self, wrap, vectorized):
        def engine(x):
            value = np.where(x[..., 0] > 3, np.nan, np.sum(x, -1))
            gradient = np.where(x < 0, np.inf, 1.0)
            return value, gradient

        h = sgtrick.from_numpy(engine, vectorized=vectorized)
        # A gradient that is finite where the value is NaN, one that is not, both, and neither.
        wrap(h)(tf.constant([[4.0, 1.0], [1.0, -1.0], [4.0, -1.0], [1.0, 1.0]]))
        assert h.nonfinite == 3

    def test_failures_and_gradients_that_are_not_known_are_none(self):
        def engine(x, data):
            if x[0] > 1:
                raise ArithmeticError
            return np.sum(x), (np.ones_like(x), None)

        h = sgtrick.from_numpy(engine, on_error=-np.inf)
        h(tf.constant([[0.0], [2.0]]), tf.ones([2, 1]))
        assert (h.failures, h.nonfinite) == (1, 0)

    def test_aux_does_not_count(self):
        for reply, vectorized in (((1.0, np.nan), False), (([1.0], [np.nan]), True)):
            h = sgtrick.from_numpy(lambda x: (reply, x), has_aux=True, vectorized=vectorized)  # noqa: B023
            h(tf.ones([1, 2]))
            assert h.nonfinite == 0


class TestMaskedReplies:
    """NumPy drops masks without a word, and what is under them is anything."""

    @WRAPS
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_are_nan_where_masked(self, wrap, vectorized):
        def engine(x):
            total = np.sum(x, -1)
            value = np.ma.masked_where(total > 5, np.where(total > 5, 999.0, total))
            return value, np.ma.masked_greater(x, 3.5)

        h = sgtrick.from_numpy(engine, vectorized=vectorized)
        y, (g,) = wrap(value_and_gradients)(h, tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]))
        np.testing.assert_array_equal(y, [3, np.nan, 5])
        np.testing.assert_array_equal(g, [[1, 2], [3, np.nan], [np.nan, 0]])
        assert h.nonfinite == 2

    def test_of_integers(self):
        h = sgtrick.from_numpy(
            lambda x: (np.ma.array(3, mask=True), np.ma.array([1, 2], mask=[False, True]))
        )
        y, (g,) = value_and_gradients(h, tf.ones([2]))
        assert np.isnan(y)
        np.testing.assert_array_equal(g, [1, np.nan])

    def test_without_a_mask_are_what_they_are(self):
        h = sgtrick.from_numpy(lambda x: (np.ma.array(3.0), np.ma.array(x)))
        y, (g,) = value_and_gradients(h, tf.ones([2]))
        assert y == 3
        np.testing.assert_array_equal(g, [1, 1])


class TestUsualCauses:
    @WRAPS
    @pytest.mark.parametrize(
        ("engine", "options", "message"),
        [
            (
                lambda x: (x**2, 2 * x),
                {},
                r"must have the shape \[\], got \[2\]\. That is the shape of the point\. If the value is an array, .*sum over the point; .*event_ndims=0",
            ),
            (
                lambda x: (x**2, 2 * x),
                {"vectorized": True},
                r"must have the shape \[3\], got \[3, 2\]\. That is the shape of the point\. .*value_shape=\(2,\).* sum",
            ),
            (
                lambda x: (np.sum(x**2), 2 * x),
                {"vectorized": True},
                r"must have the shape \[3\], got \[\]\. The engine is called for .* axis=-1, or leave out vectorized=True",
            ),
        ],
    )
    def test_of_wrong_shapes(self, wrap, engine, options, message):
        with pytest.raises(RAISED, match=message):
            wrap(sgtrick.from_numpy(engine, **options))(tf.ones([3, 2]))

    @pytest.mark.parametrize("value", [[3.0], np.full([1, 1], 3.0), 3.0])
    @pytest.mark.parametrize("vectorized", [True, False])
    def test_an_array_of_one_is_one_number(self, value, vectorized):
        h = sgtrick.from_numpy(lambda x: (value, x), vectorized=vectorized)
        np.testing.assert_array_equal(h(tf.ones([1, 2])), [3.0])
        np.testing.assert_array_equal(h(tf.ones([2])), 3.0)

    def test_a_sum_over_a_batch_of_one(self):
        """Would be right for this batch alone."""
        h = sgtrick.from_numpy(lambda x: (np.sum(x), x), vectorized=True)
        with pytest.raises(ValueError, match="must return one value for each batch member"):
            h(tf.ones([1, 2]))

    def test_of_other_shapes(self):
        with pytest.raises(ValueError, match=r"got \[7\]\. .* pass its shape, value_shape=\(7,\)"):
            sgtrick.from_numpy(lambda x: (np.ones(7), x))(tf.ones([2]))


def test_defaults_that_a_call_leaves_out_beside_a_tuple_of_event_ndims():
    def engine(x, scale=3.0, shift=0.0):
        return scale * np.sum(x) + shift, (np.full_like(x, scale), np.sum(x), 1.0)

    def of_one(x, scale=3.0, shift=0.0):
        value, gradients = engine(x, scale, shift)
        return value, gradients[0]

    h = sgtrick.from_numpy(of_one, event_ndims=(1, 0, 0))
    x = tf.ones([2, 2])
    y, (g,) = value_and_gradients(h, x)
    np.testing.assert_array_equal(y, [6, 6])
    np.testing.assert_array_equal(g, 3 * np.ones([2, 2]))
    h = sgtrick.from_numpy(engine, event_ndims=(1, 0, 0))
    np.testing.assert_array_equal(h(x, shift=1.0, scale=[2.0, 5.0][0]), [5, 5])
    with pytest.raises(
        ValueError, match=r"event_ndims must .* one entry for each .*, got \(1, 0, 0, 0\)"
    ):
        sgtrick.from_numpy(of_one, event_ndims=(1, 0, 0, 0))(x)


def test_the_engine_s_message_ends_what_graphs_raise():
    """Above it are forty lines of where TensorFlow Probability made the operation."""

    def engine(x):
        raise ArithmeticError("the solver did not converge")

    h = sgtrick.from_numpy(engine)

    @tf.function(autograph=False)
    def sample():
        kernel = tfp.mcmc.HamiltonianMonteCarlo(h, 0.1, 3)
        return tfp.mcmc.sample_chain(3, tf.zeros([2]), kernel=kernel, trace_fn=None, seed=[1, 2])

    with pytest.raises(tf.errors.UnknownError) as caught:
        sample()
    lines = [line for line in str(caught.value).splitlines() if line.strip()]
    last = next(k for k, line in enumerate(lines) if "[[{{node" in line)  # TensorFlow's own
    assert (
        lines[last - 2]
        == "RuntimeError: engine raised ArithmeticError: the solver did not converge"
    )
    assert lines[last - 1] == "  x = [0., 0.]"
    assert "engine.py" not in "".join(lines[last - 12 : last])  # nor our own frames before it


def normal_log_prob(x):
    return -0.5 * tf.reduce_sum(x**2, -1)


class TestInside:
    """Samplers, joint distributions, variational inference and Keras, beside native code."""

    @pytest.mark.parametrize("shape", [[4, 3], [None, 3]])
    def test_hmc_draw_for_draw(self, shape):
        leapfrogs, draws = 3, 5

        def sample(log_prob):
            kernel = tfp.mcmc.HamiltonianMonteCarlo(log_prob, 0.3, leapfrogs)

            @tf.function(input_signature=[tf.TensorSpec(shape, tf.float64)])
            def run(state):
                return tfp.mcmc.sample_chain(
                    draws, state, kernel=kernel, trace_fn=None, seed=[1, 2]
                )

            return run(tf.constant(POINTS))

        h = sgtrick.from_numpy(engines.normal)
        np.testing.assert_allclose(sample(h), sample(normal_log_prob), rtol=1e-10)
        assert h.calls == len(POINTS) * (1 + leapfrogs * draws)

    def test_nuts_draw_for_draw(self):
        @tf.function
        def sample(log_prob):
            kernel = tfp.mcmc.NoUTurnSampler(
                log_prob, tf.constant(0.4, tf.float64), max_tree_depth=3
            )
            return tfp.mcmc.sample_chain(
                4, tf.constant(POINTS), kernel=kernel, trace_fn=None, seed=[1, 2]
            )

        h = sgtrick.from_numpy(engines.normal)
        np.testing.assert_allclose(sample(h), sample(normal_log_prob), rtol=1e-10, atol=1e-10)

    def test_a_sampler_rejects_where_the_engine_fails(self):
        h = sgtrick.from_numpy(engines.fails_beyond_one, on_error=-np.inf)

        @tf.function
        def sample():
            kernel = tfp.mcmc.HamiltonianMonteCarlo(h, tf.constant(0.5, tf.float64), 3)
            return tfp.mcmc.sample_chain(
                60, tf.zeros([4, 2], tf.float64), kernel=kernel, trace_fn=None, seed=[1, 2]
            )

        draws = sample().numpy()
        assert h.failures > 10
        assert np.all(draws <= 1)
        assert len(np.unique(draws)) > 100

    def test_keras_loss(self):
        def squared(y_true, y_pred):
            return np.sum((y_pred - y_true) ** 2), (None, 2 * (y_pred - y_true))

        def fit(loss):
            dense = keras.layers.Dense(2, kernel_initializer="ones")
            model = keras.Sequential([keras.Input([3]), dense])
            model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
            x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
            model.fit(x, x[:, :2], epochs=2, batch_size=4, shuffle=False, verbose=0)
            return dense.kernel.numpy()

        came = fit(sgtrick.from_numpy(squared))
        native = fit(lambda y_true, y_pred: tf.reduce_sum((y_pred - y_true) ** 2, -1))
        np.testing.assert_allclose(came, native, rtol=1e-5)
        assert np.abs(native - 1).max() > 0.05


def test_autograph_rewrites_no_more_than_the_call(monkeypatch):
    """It takes a second to rewrite all that an engine's forward pass calls."""
    rewritten = []
    transform = transpiler.PyToPy.transform_function

    def noticed(self, f, context):
        rewritten.append(f.__qualname__)
        return transform(self, f, context)

    monkeypatch.setattr(transpiler.PyToPy, "transform_function", noticed)
    h = sgtrick.from_numpy(engines.normal)
    np.testing.assert_allclose(tf.function(lambda x: h(x))(POINTS[0]), h(POINTS[0]))
    assert [name for name in rewritten if "lambda" not in name] == ["HostFunction.__call__"]
