"""How much Python one question to an engine takes, counted: time would depend on the machine."""

import sys

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from sgtrick._host import host_call
from shared import value_and_gradients


def calls_of(f, *args):
    """How many functions of Python are called, outside TensorFlow's own code."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event == "call" and "tensorflow" not in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        f(*args)
    finally:
        sys.setprofile(before)
    return count


# For a question, and for each member.
ENGINES = {
    "value and gradient": (lambda x: (1.0, np.ones(3)), {}, 45, 20),
    "where failures are replaced": (lambda x: (1.0, np.ones(3)), {"on_error": 0.0}, 45, 20),
    "two functions": (lambda x: 1.0, {"grad": lambda x: np.ones(3)}, 50, 26),
    "a value alone": (lambda x: 1.0, {"grad": False}, 40, 15),
    "an array": (lambda x: np.ones(2), {"grad": False, "value_shape": (2,)}, 40, 16),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_one_question(kind, monkeypatch):
    """As TensorFlow asks it in a graph."""
    fn, options, fixed, each = ENGINES[kind]
    h, asked = sgtrick.from_numpy(fn, **options), []
    monkeypatch.setattr(
        host_call.numpy_function, "host_call", lambda ask, xs, dtypes: asked.append(ask) or xs
    )
    for batch in ((), (8,), (2, 4), (50,)):
        x, n = np.ones([*batch, 3]), int(np.prod(batch))
        with pytest.raises((IndexError, ValueError)):  # there is no operation
            tf.function(h).get_concrete_function(tf.constant(x))
        ask = asked.pop()
        ask(x)
        assert calls_of(ask, x) <= fixed + each * n * bool(batch)
    vectorized = sgtrick.from_numpy(
        lambda x: tuple(np.ones(s) for s in ([50], [50, 3])), vectorized=True
    )
    with pytest.raises((IndexError, ValueError)):
        tf.function(vectorized).get_concrete_function(tf.constant(x))
    ask = asked.pop()
    ask(x)
    assert calls_of(ask, x) <= 52


def test_eager_calls():
    """The second time: the layout of the first is taken. TensorFlow 2.16 takes ten calls more."""
    h, x = sgtrick.from_numpy(lambda x, n: (x @ x, (2 * x, None))), tf.ones([3])
    h(x, tf.ones([2]))
    assert calls_of(h, x, tf.ones([2])) <= 250
    np.testing.assert_array_equal(value_and_gradients(lambda x: h(x, tf.ones([2])), x)[1][0], 2 * x)


@pytest.mark.parametrize("others", [(1, 1.0, True), (0.0, -0.0), ("a", b"a"), (2, 3)])
def test_numbers_of_python_are_those_of_the_call(others):
    """Though the call before had equal ones of another kind."""
    seen = []
    h = sgtrick.from_numpy(lambda x, a: seen.append(repr(a)) or 1.0, grad=False, event_ndims=0)
    for _ in range(2):
        for other in others:
            h(tf.constant(1.0), other)
    assert seen == list(map(repr, others)) * 2


def test_layouts_are_those_of_the_call():
    """Of shapes, dtypes and structures in turn."""
    h = sgtrick.from_numpy(lambda x, y: (np.sum(x) + np.sum(y), (x, y)), event_ndims=1)
    a, b = tf.ones([2]), tf.ones([3], tf.float64)
    for x, y in ((a, b), (b, a), (a, tf.ones([2])), (tf.ones([2, 3]), b), (a, b)):
        value, gradients = value_and_gradients(h, x, y)
        assert [g.dtype for g in gradients] == [x.dtype, y.dtype]
        np.testing.assert_array_equal(gradients[0], x)
        np.testing.assert_array_equal(value, tf.reduce_sum(x, -1).numpy() + y.shape[0])
