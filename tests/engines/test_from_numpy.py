"""The contract of `from_numpy`."""

import gc
import threading
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from tensorflow.python.autograph.pyct import transpiler

import engine_functions as engines
import sgtrick
import sgtrick._host.from_numpy
from matrix import CELLS, Case, judge, pairs, promised
from matrix import functions as fn
from matrix.values import MATRICES, NUMBERS, POINTS
from shared import WRAPS, value_and_gradients

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
