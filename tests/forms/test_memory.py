"""Peak memory of the value form, in temporaries of the size of `x`; what graphs leave; growth.

The work of tracing, and with it the graph, grows in proportion to the number of calls.
"""

import gc
import subprocess
import sys
import weakref

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops

import sgtrick
from asinh_forms import ALL, EVERY_ORDER, POINTS, every_order, hidden, slope
from matrix import spread
from shared import FIRST_WAYS, derivative, forward_derivative, mapped

FORMS = [*EVERY_ORDER, "custom_gradient", "from_numpy"]  # the others differ in their rule

SCRIPT = """
import os, resource
import tensorflow as tf
import sgtrick

n = 20_000_000

def run(fx, gx, x, upstream):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = sgtrick.custom_gradient(fx, gx, x)
    return y, tape.gradient(y, x, upstream)  # TensorFlow would compute no more than is returned

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def temporaries(f):
    f(tf.constant(1.0), tf.ones([2]), tf.ones([2]), tf.constant(2.0))
    args = tf.constant(1.0), tf.ones([n]), tf.ones([n]), tf.constant(2.0)
    before = peak()
    f(*args)
    return (peak() - before) / (4 * n)

# A peak is that of a process: of a copy of this one, in which TensorFlow has not run yet.
for f in (run, tf.function(run)):
    if not os.fork():
        print(temporaries(f), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
@pytest.mark.long
def test_at_most_one_temporary_more_than_needed():
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    eager, graph = map(float, out.stdout.split())
    assert eager < 1 + 1.2  # the gradient alone
    assert graph < 2 + 1.2  # z, in whose place gx * z is, and the gradient


class TestGraphs:
    """Die with who traced them: nothing of TensorFlow's may hold what a form needs."""

    MODES = {
        "gradient": derivative,
        "second derivative": lambda f: derivative(derivative(f)),
        "forward mode": forward_derivative,
        "mapped": lambda f: derivative(mapped(f)),
    }

    @staticmethod
    def traced(f):
        """Weak references to the graphs of a function that is dropped then."""
        graphs = []

        @tf.function
        def run(x):
            graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
            return f(x)

        run.get_concrete_function(tf.TensorSpec([3], tf.float64))
        return graphs

    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    @pytest.mark.parametrize("name", FORMS)
    def test_are_freed(self, name, mode):
        before = registered()
        graphs = self.traced(mode(ALL[name]))
        gc.collect()
        assert graphs
        assert [g() for g in graphs if g() is not None] == []
        assert registered() <= before

    def test_the_test_sees_what_is_kept(self):
        """TensorFlow's own form keeps its graph."""
        form = tf.custom_gradient(lambda x: (tf.sin(x), lambda u: u * tf.cos(x)))
        graphs = self.traced(derivative(form))
        gc.collect()
        assert graphs[0]() is not None


def work(f):
    """How many functions Python calls to trace one, which unlike the time is always the same.

    It is if nothing of earlier tests is collected meanwhile, since finalizers are counted too.
    """
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    trace = tf.function(f, autograph=False).get_concrete_function
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        trace(tf.TensorSpec([3], tf.float64))
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def closing_over(previous):
    """Forms whose functions and rules use a tensor that was computed before."""
    return every_order(
        lambda x: hidden(x) + 0 * previous,
        lambda x: slope(x) + 0 * previous,
        lambda y, a: tf.sinh(y) - a + 0 * previous,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "mode"),
    spread(
        [*((name, False) for name in FORMS), *((name, True) for name in EVERY_ORDER)],
        ["gradient", "second derivative", "forward mode"],
        together=1,
        valid=lambda form, mode: form[0] != "implicit_root" or mode == "gradient",  # is long
    ),
    ids=str,
)
def test_tracing_takes_work_in_proportion_to_calls(form, mode):
    """What a gradient depends on is looked for in the graph, but not in all that came before."""
    name, closes_over = form

    def chain(calls):
        def run(x):
            previous = x
            for _ in range(calls):
                form = closing_over(previous)[name] if closes_over else ALL[name]
                previous, x = x, form(x)
            return x

        return run

    mode = TestGraphs.MODES[mode]
    work(mode(chain(2)))  # what is done once
    few, more, many = (work(mode(chain(calls))) for calls in (2, 4, 8))
    assert many - more <= 2.2 * (more - few), (few, more, many)


@pytest.mark.parametrize("name", [*EVERY_ORDER, "custom_gradient"])
def test_what_nobody_records_is_freed_in_eager(name):
    """As the function runs, which makes many tensors that no derivative depends on."""
    freed = []

    def noisy(x):
        for _ in range(3):
            other = tf.random.normal([8], dtype=tf.float64) + 1
            kept = weakref.ref(other)
            del other
            gc.collect()
            freed.append(kept() is None)
        return hidden(x)

    form = every_order(noisy, slope, lambda y, a: tf.sinh(y) - a)
    form["custom_gradient"] = lambda x: sgtrick.custom_gradient(noisy(x), slope(x), x)
    derivative(form[name])(tf.constant(POINTS))
    assert freed
    assert all(freed)


@pytest.mark.parametrize(
    ("way", "most"), [("in tf.function", 3), ("around tf.function", 3), ("jacobian", 7)]
)
def test_rules_of_rules_are_traced_when_they_are_asked_for(way, most):
    """Where a rule calls its own function twice; a map takes one order more."""
    count = 0

    @sgtrick.custom_vjp
    def shifted_sine(x, k):
        nonlocal count
        count += 1
        pull = lambda u: (u * (shifted_sine(x, k + 1) + shifted_sine(x, k - 3)) / 2, None)  # noqa: E731
        return tf.sin(x + k * np.pi / 2), pull

    def jacobian(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = shifted_sine(x, 0)
        return tf.linalg.diag_part(tape.jacobian(y, x))

    runs = FIRST_WAYS | {"jacobian": lambda _: tf.function(jacobian)}
    found = runs[way](lambda x: shifted_sine(x, 0))(tf.constant(POINTS))
    np.testing.assert_allclose(found, np.cos(POINTS), atol=1e-12)
    assert count <= most


def registered():
    """How many gradients of sgtrick are in TensorFlow's registry, after the dead ones have left."""
    gc.collect()
    return sum(name.startswith("sgtrick") for name in ops.gradient_registry._registry)


def held():
    """How many graphs, functions and gradients TensorFlow holds."""
    gc.collect()
    return {
        "graphs": sum(isinstance(o, tf.Graph) for o in gc.get_objects()),
        "functions": len(context.context().list_function_names()),
        "gradients": registered(),
    }


def insist_on_no_growth(run):
    """Of `run(a)`, by another number each time."""
    run(0.5)
    run(0.75)
    before = held()
    for a in (1.0, 1.25, 1.5):
        run(a)
    assert {what: n for what, n in held().items() if n > before[what]} == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "way"), spread(FORMS, ["eager vectorized_map", "retraced function"], together=1)
)
def test_loops_over_numbers(name, way):
    """A Python number is a part of the graph, so that another one is another graph."""
    form, x = ALL[name], tf.constant(POINTS)

    def mapped_once(a):
        derivative(mapped(lambda member: form(a * member)))(x)

    def traced_twice(a):
        traced = tf.function(lambda x, a: form(a * x))
        derivative(lambda x: traced(x, a) + traced(x, a + 1.0))(x)

    insist_on_no_growth(mapped_once if way == "eager vectorized_map" else traced_twice)


def test_engines_that_are_dropped_are_freed():
    """Made, used and dropped in a loop, each closing over a number. (Graphs keep them.)"""
    x = tf.constant(POINTS)
    engines = []

    def run(a):
        def engine(x):
            return a * x**2, 2 * a * x

        engines.append(weakref.ref(engine))
        h = sgtrick.from_numpy(engine, event_ndims=0, vectorized=True)
        np.testing.assert_allclose(derivative(h)(x), 2 * a * POINTS)

    insist_on_no_growth(run)
    assert [engine() for engine in engines if engine() is not None] == []
