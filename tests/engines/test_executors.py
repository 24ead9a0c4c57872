"""Batch members evaluated at once: threads, processes and a cluster"""

import ctypes
import multiprocessing
import threading
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import engine_functions as engines
import sgtrick
from array_model import (
    GIVEN,
    MODELS,
    WAYS,
    by_forward_mode,
    found_in,
    gradients,
    reverse_over_reverse,
)
from hanging import HANGS
from matrix import spread
from shared import WRAPS, derivative, mapped_with_loops

RAISED = (RuntimeError, tf.errors.UnknownError)
POINTS = np.random.default_rng(3).normal(size=(8, 3))


def within_a_minute(f, *args):
    """The result or exception of `f`, which fails here where it would hang."""
    runner = futures.ThreadPoolExecutor(1)
    try:
        return runner.submit(f, *args).result(timeout=HANGS)
    finally:
        runner.shutdown(wait=False)


def process_pool(workers=2):
    context = multiprocessing.get_context("spawn")
    return futures.ProcessPoolExecutor(workers, mp_context=context)


@pytest.fixture(scope="module")
def processes():
    with process_pool() as executor:
        yield executor


@pytest.fixture(scope="module")
def threads():
    with futures.ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture(scope="module")
def client():
    distributed = pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    quiet = {"distributed.scheduler.allowed-failures": 1, "logging.distributed": "critical"}
    with (
        dask.config.set(quiet),
        distributed.LocalCluster(
            2, threads_per_worker=1, host="127.0.0.1", dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture(params=["threads", "processes", "cluster"])
def executor(request):
    if request.param == "cluster":
        return request.getfixturevalue("client").get_executor()
    return request.getfixturevalue(request.param)


@WRAPS
def test_an_engine_that_raises(executor, wrap):
    x = tf.constant([[0.5, 0.5], [0.25, 2.0], [0.0, 1.0]], tf.float64)
    h = sgtrick.from_numpy(engines.fails_beyond_one, executor=executor)
    match = r"(?s)raised ArithmeticError: no solution at 0\.25.*x = \[0\.25, 2\. +\]"
    with pytest.raises(RAISED, match=match):
        within_a_minute(wrap(h), x)
    h = sgtrick.from_numpy(engines.fails_beyond_one, executor=executor, on_error=-np.inf)
    np.testing.assert_array_equal(within_a_minute(wrap(h), x), [-0.25, -np.inf, -0.5])
    assert (h.calls, h.failures) == (3, 1)


def test_equal_members_are_calls_of_their_own(executor):
    h = sgtrick.from_numpy(engines.noise, executor=executor)
    assert len(np.unique(within_a_minute(h, tf.zeros([8, 2], tf.float64)))) == 8


def test_functions_of_derivatives_and_vectorized_engines(executor):
    x, y = tf.constant(POINTS), tf.constant(POINTS[:, 0])
    square = sgtrick.from_numpy(
        engines.square, grad=engines.square_gradient, hessp=engines.square_hessp, executor=executor
    )
    first = within_a_minute(derivative(square), x)
    np.testing.assert_allclose(first, 2 * x)
    second = within_a_minute(derivative(derivative(square)), x)
    np.testing.assert_allclose(second, tf.fill(x.shape, 2.0))
    assert (square.calls, square.hess_calls) == (16, 8)
    matrices = tf.constant(np.tile(POINTS[:, :2, None], 2))
    whole = sgtrick.from_numpy(engines.two, event_ndims=(2, 0), vectorized=True, executor=executor)
    by_y = within_a_minute(derivative(whole, 1), matrices, y)
    np.testing.assert_allclose(by_y, tf.reduce_sum(matrices**3, [-2, -1]) * tf.cos(y))
    assert whole.calls == 1


@pytest.mark.parametrize("vectorized", [True, False])
@pytest.mark.parametrize("executor", [None, "threads", "main thread"])
def test_functions_do_not_see_what_the_other_did_to_its_arguments(executor, vectorized, threads):
    seen = threading.Event()

    def fn(x):
        x *= 0
        seen.set()
        return np.sum(x, -1)

    def grad(x):
        assert seen.wait(timeout=HANGS)
        return 2 * x

    executor = {"threads": threads, "main thread": sgtrick.MainThreadExecutor()}.get(executor)
    h = sgtrick.from_numpy(fn, grad=grad, vectorized=vectorized, executor=executor)
    x = tf.constant(POINTS if vectorized else POINTS[:1])
    np.testing.assert_array_equal(derivative(h)(x), 2 * x)


def in_one_array(f, work):
    """`f`, which returns its results in one work array, as compiled solvers do."""

    def frugal(*args):
        begin = 0

        def moved(part):
            nonlocal begin
            own = work[begin : begin + np.size(part)].reshape(np.shape(part))
            own[...], begin = part, begin + own.size
            return own

        return tf.nest.map_structure(moved, f(*args))

    return frugal


SERIAL = ["no executor", "one worker", "main thread", "main thread in run"]


def has_what_it_needs(law, given, name, serial, vectorized, way):
    # Outside of run, nobody serves the threads from which TensorFlow calls the engine of a graph,
    # and in forward mode.
    is_served = serial != "main thread" or (way == "eager" and law is not by_forward_mode)
    return is_served and (law is not reverse_over_reverse or "point" not in given)


CASES = spread(
    [gradients, by_forward_mode, reverse_over_reverse],
    [given for given in GIVEN if given != "2-point"],
    MODELS, SERIAL, [True, False], ["eager", "in tf.function"],
    valid=has_what_it_needs,
)  # fmt: skip


@pytest.mark.parametrize(("law", "given", "name", "serial", "vectorized", "way"), CASES)
def test_one_thread_may_return_the_same_array_each_time(law, given, name, serial, vectorized, way):
    """For all that it returns, also if a graph makes several calls at the same time."""
    work, model = np.zeros(1000), MODELS[name]
    functions = GIVEN[given](model)
    if law is reverse_over_reverse:
        functions["hessp"] = model.hessp
    frugal = {k: in_one_array(f, work) if callable(f) else f for k, f in functions.items()}
    main = sgtrick.MainThreadExecutor()
    run = main.run if serial == "main thread in run" else lambda f: f()
    with futures.ThreadPoolExecutor(1) as one:
        executor = {"no executor": None, "one worker": one}.get(serial, main)
        h = sgtrick.from_numpy(
            **frugal, event_ndims=(1, 0), value_shape=model.value_shape,
            vectorized=vectorized, executor=executor,
        )  # fmt: skip

        def several(f):
            f = model.spread(f)
            return lambda x, a: f(x, a) - f(2 * x, a) + f(3 * x, a)

        came = run(lambda: found_in(WAYS[way], law, several(h)))
    rtol = 1e-6 if "point" in given else 1e-12
    for a, b in zip(came, law(several(model.true)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


BUFFERS = {
    "array": lambda a: a,
    "masked": lambda a: np.ma.masked_array(a, mask=[False, False, True]),
    "memoryview": memoryview,
    "ctypes": lambda a: (ctypes.c_double * 3).from_buffer(a.data),
    "list of arrays": lambda a: [a[:1], a[1:2], a[2:]],
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("apart", [True, False], ids=["grad", "executor"])
def test_a_buffer_of_any_kind(kind, apart):
    work = np.zeros(3)

    def value(x):
        work[...] = x**2
        return BUFFERS[kind](work)

    def jacobian(x):
        work[...] = 0  # before its value is used
        rows = np.diag(2 * x)
        return list(rows[:, np.newaxis]) if kind == "list of arrays" else rows

    shape = [(1,)] * 3 if kind == "list of arrays" else (3,)
    with futures.ThreadPoolExecutor(1) as one:
        if apart:
            h = sgtrick.from_numpy(value, grad=jacobian, value_shape=shape)
        else:
            h = sgtrick.from_numpy(value, grad=False, value_shape=shape, executor=one)
        y = h(tf.constant(POINTS))
    y = tf.concat(y, -1) if isinstance(y, list) else y
    want = np.where([False, False, kind == "masked"], np.nan, POINTS**2)
    np.testing.assert_array_equal(y, want)


@WRAPS
@pytest.mark.parametrize("name", ["value", "mapped", "hessp"])
def test_members_are_evaluated_at_once(threads, wrap, name):
    meeting = threading.Barrier(4)

    def meets(f):
        def engine(*args):
            meeting.wait(timeout=HANGS)  # raises unless four calls are here together
            return f(*args)

        return engine

    if name in ("value", "mapped"):
        h = sgtrick.from_numpy(meets(engines.normal), executor=threads)
        run, want = (mapped_with_loops(h) if name == "mapped" else h), -0.5 * np.sum(POINTS**2, -1)
    else:
        h = sgtrick.from_numpy(
            engines.square, grad=engines.square_gradient, hessp=meets(engines.square_hessp),
            executor=threads,
        )  # fmt: skip
        run, want = derivative(derivative(h)), np.full(POINTS.shape, 2.0)
    np.testing.assert_allclose(wrap(run)(tf.constant(POINTS)), want)
    assert len(POINTS) in (h.calls, h.hess_calls)


def test_a_vectorized_engine_that_fails_is_asked_again_for_each_member(executor):
    h = sgtrick.from_numpy(
        engines.many_fail_beyond_one, vectorized=True, executor=executor, on_error=-np.inf
    )
    x = tf.constant([[0.5, 0.5], [0.25, 2.0], [0.0, 1.0]], tf.float64)
    np.testing.assert_array_equal(within_a_minute(h, x), [-0.25, -np.inf, -0.5])
    assert (h.calls, h.failures) == (4, 1)


def test_a_process_that_dies():
    message = "dies_beyond_one got no answer from its executor: BrokenProcessPool.*worker has died"
    with process_pool() as processes:
        h = sgtrick.from_numpy(engines.dies_beyond_one, executor=processes, on_error=-np.inf)
        graph = tf.function(h)
        within_a_minute(graph, tf.zeros([2, 3]))
        for lost in (graph, h):  # for good
            with pytest.raises(RAISED, match=message):
                within_a_minute(lost, tf.constant(POINTS + 1))
        assert h.failures == 0


def test_an_exception_that_cannot_be_unpickled():
    message = (
        r"(?s)got no answer from its executor: BrokenProcessPool.* not unpickled here: raise one "
        r".* ArithmeticError\(str\(error\)\)\..*TypeError: .*missing 1 required .*: 'why'"
    )
    with process_pool(1) as processes:
        h = sgtrick.from_numpy(engines.raises_what_cannot_be_unpickled, executor=processes)
        with pytest.raises(RAISED, match=message):
            within_a_minute(tf.function(h), tf.zeros([2, 3]))


def test_a_worker_of_the_cluster_that_dies_once(client, tmp_path):
    h = sgtrick.from_numpy(
        engines.DiesOnce(str(tmp_path / "died")), executor=client.get_executor(), name="mortal"
    )
    np.testing.assert_allclose(
        within_a_minute(h, tf.constant(POINTS)), -0.5 * np.sum(POINTS**2, -1)
    )
    assert (tmp_path / "died").exists()
    assert (h.calls, h.failures) == (8, 0)


@pytest.mark.long
def test_a_task_that_kills_every_worker_of_the_cluster(client):
    h = sgtrick.from_numpy(engines.dies_beyond_one, executor=client.get_executor())
    with pytest.raises(RuntimeError, match="dies_beyond_one raised KilledWorker: "):
        within_a_minute(h, tf.constant([[2.0, 2.0]]))


def test_what_was_submitted_is_cancelled_if_the_rest_cannot_be():
    submitted = []

    class Full(futures.Executor):
        def submit(self, *args):
            if submitted:
                raise ValueError("the queue is full")
            submitted.append(futures.Future())
            return submitted[0]

    h = sgtrick.from_numpy(engines.square, grad=engines.square_gradient, executor=Full())
    with pytest.raises(RuntimeError, match="ValueError: the queue is full"):
        h(np.ones(2))
    assert submitted[0].cancelled()


def test_an_executor_that_is_shut_down():
    executor = futures.ThreadPoolExecutor(1)
    executor.shutdown()
    h = sgtrick.from_numpy(engines.normal, executor=executor, on_error=-np.inf)
    with pytest.raises(RuntimeError, match=r"got no answer from its executor: .*after shutdown"):
        h(tf.zeros([2]))


@pytest.mark.parametrize("name", ["fn", "grad", "hessp"])
def test_functions_that_cannot_be_sent(processes, name):
    functions = {"fn": engines.square} | {name: lambda *args: engines.normal(*args)}
    message = r"executor is a process pool, to which .* cannot be sent: .* top level of a module"
    with pytest.raises(TypeError, match=message):
        sgtrick.from_numpy(**functions, executor=processes)


@pytest.mark.long
def test_members_left_over_after_an_error_are_not_evaluated():
    blocked, evaluated = threading.Event(), []

    def first_fails(x):
        if x[0] == 0:
            raise ArithmeticError
        blocked.wait(HANGS)
        evaluated.append(x[0])
        return engines.normal(x)

    with futures.ThreadPoolExecutor(2) as executor:
        h = sgtrick.from_numpy(first_fails, executor=executor)
        with pytest.raises(RuntimeError, match="raised ArithmeticError"):
            h(tf.range(8.0)[:, tf.newaxis])
        blocked.set()
    assert len(evaluated) <= 2
