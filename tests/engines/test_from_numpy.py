"""The contract of `from_numpy`."""

import gc
import math
import threading
import time
import weakref
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from tensorflow.python.autograph.pyct import transpiler

import engine_functions as engines
import sgtrick
import sgtrick._host.engine as engine_record
from array_model import VECTORIZED
from hanging import HANGS
from matrix import CELLS, Case, judge, pairs, promised, spread
from matrix import functions as fn
from matrix.values import MATRICES, NUMBERS, POINTS
from shared import FIRST_WAYS, WRAPS, Way, mapped, value_and_gradients

CANNOT_COMPILE = (NotImplementedError, "calls the host, which XLA cannot compile")
CANNOT_STORE = (AssertionError, "A host engine .* cannot be stored in a SavedModel")
CANNOT = {name: CANNOT_COMPILE for name in CELLS if name.endswith("XLA")} | {
    "SavedModel with custom gradients": CANNOT_STORE,
    "SavedModel without custom gradients": CANNOT_STORE,
    "TFLite, the value": (Exception, "PyFunc"),
    "unknown ranks": (ValueError, "has an unknown rank. Set its rank"),
}

engine = sgtrick.from_numpy(engines.scalar)
engine_with_hessian = sgtrick.from_numpy(
    engines.scalar, hessp=lambda x, v: fn.scalar_hessian(tf.constant(x)).numpy() @ v
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


# How often each member is evaluated in cells that ask for its value and first derivative once.
EVALUATIONS = {
    "eager tape": 1,
    "persistent tape, asked twice": 1,
    "tape in `tf.function`": 1,
    "tape around `tf.function`": 1,
    "unknown dimensions": 1,
    "TF1 graph, `tf.gradients`": 1,
    "`tape.jacobian`": 1,
    "`tape.batch_jacobian`": 1,
    "tape around `vectorized_map`": 1,
    "`vectorized_map` around a tape": 1,
    "`tf.map_fn`": 1,
    "`tf.scan`": 1,
    "`tf.while_loop`": 3,
    "`ForwardAccumulator` in eager": 1,
    "`ForwardAccumulator` in `tf.function`": 1,
    "`tf.recompute_grad`": 2,  # which computes the forward again
    "`MirroredStrategy` in `tf.function`": 1,
}
assert EVALUATIONS.keys() <= CELLS.keys() - CANNOT.keys()


@pytest.mark.parametrize(
    ("case", "cell"), [p for p in PAIRS if p.values[1].name not in CANNOT], **IDS
)
def test_matrix(case, cell):
    before = engine.calls
    assert judge(cell, case) in promised(cell, case)
    if case.form is engine and cell.name in EVALUATIONS:
        assert engine.calls - before == EVALUATIONS[cell.name] * len(POINTS)


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

    @WRAPS
    @VECTORIZED
    def test_shapes_and_number(self, wrap, vectorized):
        seen = []

        def engine(x):
            seen.append(x.shape)
            return np.sum(x, -1), np.ones_like(x)

        h = sgtrick.from_numpy(engine, vectorized=vectorized)
        for shape in ([2, 3, 5], [5], [3, 0, 5], [2, 0]):
            seen.clear()
            before = h.calls
            y, (g,) = wrap(value_and_gradients)(h, tf.ones(shape))
            assert (y.shape, g.shape) == (shape[:-1], shape)
            members = math.prod(shape[:-1])
            each = [tuple(shape)] * min(members, 1) if vectorized else [tuple(shape[-1:])] * members
            assert seen == each
            assert h.calls - before == len(seen)
        assert h.failures == 0

    @WRAPS
    @VECTORIZED
    def test_the_engine_may_change_and_keep_its_arrays(self, wrap, vectorized):
        """And return one of them, and the same buffers each time."""
        kept = []
        # TensorFlow takes over what begins at a multiple of 64 bytes, and copies the rest.
        room = np.zeros(24)
        aligned = room[-room.ctypes.data % 64 // 8 :]
        value = aligned[: 1 + vectorized].reshape([2][: int(vectorized)])
        product = aligned[8 : 10 + 2 * vectorized].reshape([2, 2][not vectorized :])

        def engine(x):
            kept.append(x)
            np.sum(x**2, -1, out=value)
            x *= 2  # also the gradient, and its buffer
            return value, x

        def hessp(x, v):
            np.multiply(v, 2, out=product)
            x[...] = v[...] = np.nan
            return product

        h = sgtrick.from_numpy(engine, hessp=hessp, vectorized=vectorized)
        x = tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64)

        @wrap
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y, (g,) = value_and_gradients(lambda x: h(x) + h(3 * x), x)
            return y, g, tape.gradient(g, x)

        y, g, second = run(x)
        for array in (*kept, value, product):
            array[...] = np.nan
        np.testing.assert_array_equal(x, [[1, 2], [3, 4]])
        np.testing.assert_array_equal(y, [50, 250])
        np.testing.assert_array_equal(g, 20 * x)
        np.testing.assert_array_equal(second, np.full([2, 2], 20))

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

    @pytest.mark.long
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
        points = np.random.default_rng(0).normal(size=(300, 3))
        begin = time.perf_counter()
        with ThreadPoolExecutor(8) as threads:
            called = threads.map(lambda f, x: f(tf.constant(x)), [graph, h] * 150, points)
            values = np.array(list(called))
        elapsed = time.perf_counter() - begin
        negative = points[:, 0] < 0
        assert (h.calls, h.failures) == (300, negative.sum())
        assert not any(together)
        want = np.where(negative, -np.inf, -0.5 * (points**2).sum(-1))
        np.testing.assert_allclose(values, want, rtol=1e-14)
        assert 0 < h.seconds < elapsed  # since no two were together


class TestTensorsInTwoPlaces:
    @staticmethod
    def by_products(a, b, w, in_forward_mode):
        by_a, by_b = b**2, 2 * a * b
        return by_a @ w[0] + by_b @ w[1] if in_forward_mode else (w * by_a, w * by_b)

    # The value is the sum of a * b**2.
    PASSED_TWICE = {
        "pair": lambda: sgtrick.from_numpy(lambda a, b: (a @ b**2, (b**2, 2 * a * b))),
        "differences": lambda: sgtrick.from_numpy(lambda a, b: a @ b**2, grad="3-point"),
        "products": lambda: sgtrick.from_numpy(
            lambda a, b: a @ b**2,
            vjp=lambda a, b, u: TestTensorsInTwoPlaces.by_products(a, b, u, False),
            jvp=lambda a, b, t: TestTensorsInTwoPlaces.by_products(a, b, t, True),
        ),
        "parts": lambda: (
            lambda a, b: sgtrick.from_numpy(
                lambda p: (p[0] @ p[1] ** 2, [p[1] ** 2, 2 * p[0] * p[1]])
            )([a, b])
        ),
        "three": lambda: (
            lambda a, b: sgtrick.from_numpy(lambda a, b, c: (a @ (b * c), (b * c, a * c, a * b)))(
                a, b, a
            )
        ),
    }
    # Of all its members: the engine takes a vector.
    WAYS_OF_VECTORS = FIRST_WAYS | {
        "around vectorized_map": Way(inside=lambda f: lambda x: mapped(f)(x[None])[0]),
        "in map_fn": Way(around=lambda f: lambda x: tf.map_fn(f, x[None])[0]),
    }

    @pytest.mark.parametrize(("kind", "way"), spread(PASSED_TWICE, WAYS_OF_VECTORS, together=1))
    def test_have_the_sum_of_their_gradients(self, kind, way):
        h, x = self.PASSED_TWICE[kind](), tf.constant([1.0, 2.0], tf.float64)
        slopes = 3 * x**2
        want = tf.reduce_sum(slopes) if way.startswith("forward") else slopes
        run = self.WAYS_OF_VECTORS[way]
        np.testing.assert_allclose(run(lambda x: h(x, x))(x), want, rtol=1e-6)


class TestOneAtATime:
    def test_of_engines_around_one_solver(self):
        """Which TensorFlow calls from several threads."""

        class Solver:
            def run(self, x):
                self.x = x
                time.sleep(0.001)
                return np.sum(self.x**2), 2 * self.x

        solver = Solver()
        first, second = (sgtrick.from_numpy(solver.run) for _ in range(2))
        run = tf.function(lambda x: value_and_gradients(lambda x: first(x) + second(-2 * x), x))
        x = tf.constant([1.0, 2.0])
        for _ in range(10):
            y, (g,) = run(x)
            assert y == 25
            np.testing.assert_array_equal(g, 10 * x)

    def test_an_engine_that_waits_for_another_one(self, monkeypatch):
        """On its own thread it may call it."""
        monkeypatch.setattr(engine_record, "_PATIENCE", 0.05)
        inner = sgtrick.from_numpy(engines.normal)
        outer = sgtrick.from_numpy(lambda x: (inner(x).numpy(), x))
        assert outer(tf.ones([2])) == -1
        graph = tf.function(inner)
        outer = sgtrick.from_numpy(lambda x: (graph(x).numpy(), x))
        run = tf.function(outer)
        with pytest.raises(
            tf.errors.OpError, match=r"waits for its turn.*give that one an executor"
        ):
            run(tf.ones([2]))
        np.testing.assert_array_equal(inner(tf.ones([2])), -1)

    @WRAPS
    @pytest.mark.parametrize("start", ["a pool", "a thread"])
    def test_an_engine_that_waits_for_its_own_threads(self, monkeypatch, wrap, start):
        """Which call another engine. A warning says who holds the turn, and where."""
        monkeypatch.setattr(engine_record, "_PATIENCE", 0.05)
        inner, done = sgtrick.from_numpy(engines.normal), threading.Event()

        def ask():
            inner(tf.ones([2]))
            done.set()

        def outer(x):
            if start == "a pool":
                pool.submit(ask)
            else:
                threading.Thread(target=ask, daemon=True).start()
            while not warned:
                time.sleep(0.01)
            return 0.0, x

        pool = futures.ThreadPoolExecutor(1)
        message = (
            r"(?s)normal has waited for 0\.05 seconds, .* outer is being called\. If outer waits .*"
            r"give normal an executor.*test_from_numpy.py.*(while not warned|time\.sleep)"
        )
        with pool, pytest.warns(RuntimeWarning, match=message) as warned:
            wrap(sgtrick.from_numpy(outer))(tf.ones([2]))
        assert done.wait(HANGS)
        sgtrick.from_numpy(engines.normal)(tf.ones([2]))  # nobody holds it


STEP = tf.constant(0.3, tf.float64)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kernel", "shape", "calls"),
    [
        (lambda f: tfp.mcmc.HamiltonianMonteCarlo(f, STEP, 3), [None, 3], 4 * 16),
        (lambda f: tfp.mcmc.NoUTurnSampler(f, STEP, max_tree_depth=3), [4, 3], None),
    ],
    ids=["hmc of unknown shape", "nuts"],
)
def test_draw_for_draw(kernel, shape, calls):
    def sample(log_prob):
        @tf.function(input_signature=[tf.TensorSpec(shape, tf.float64)])
        def run(state):
            return tfp.mcmc.sample_chain(
                5, state, kernel=kernel(log_prob), trace_fn=None, seed=[1, 2]
            )

        return run(tf.constant(POINTS))

    h = sgtrick.from_numpy(engines.normal)
    native = sample(lambda x: -0.5 * tf.reduce_sum(x**2, -1))
    np.testing.assert_allclose(sample(h), native, rtol=1e-10, atol=1e-10)
    assert calls in (h.calls, None)


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
