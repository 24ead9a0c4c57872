"""The bar of calls, while compiled code runs."""

import io
import sys
import threading
from contextlib import redirect_stderr

import numpy as np
import pytest
import tensorflow as tf

import engine_functions as engines
import sgtrick

X = tf.constant([0.1, 0.2])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_of_the_calls_in_the_scope():
    h = sgtrick.from_numpy(engines.normal)
    h(X)
    with redirect_stderr(Terminal()) as terminal, h.progress(total=4):
        tf.map_fn(h, tf.stack([X, X, X]))
    shown = terminal.getvalue()
    assert "normal: " in shown
    assert " 3/4 [" in shown
    assert "call/s" in shown
    assert "failures" not in shown


def test_without_a_total_and_with_failures():
    h = sgtrick.from_numpy(engines.fails_beyond_one, on_error=-np.inf)
    with redirect_stderr(Terminal()) as terminal, h.progress(desc="warm-up"):
        h(tf.constant([[2.0, 0.0], [0.0, 0.0]]))
    shown = terminal.getvalue()
    assert "warm-up: 2call [" in shown
    assert "failures=1" in shown


def test_while_a_graph_runs():
    """The engine itself waits until its second call is seen."""
    seen = threading.Event()

    class Watched(Terminal):
        def write(self, text):
            if " 2/3 [" in text:
                seen.set()
            return super().write(text)

    def engine(x):
        if h.calls == 2:
            assert seen.wait(60)
        return np.sum(x), np.ones_like(x)

    h = sgtrick.from_numpy(engine)
    run = tf.function(lambda x: tf.scan(lambda y, _: y + h(x), tf.range(3), tf.constant(0.0)))
    with redirect_stderr(Watched()), h.progress(total=3):
        y = run(X)
    assert h.calls == 3
    np.testing.assert_allclose(y[-1], 3 * tf.reduce_sum(X), rtol=1e-6)


def test_an_error_ends_it():
    h = sgtrick.from_numpy(engines.fails_beyond_one)
    terminal, raises = Terminal(), pytest.raises((RuntimeError, tf.errors.OpError), match="raised")
    before = threading.active_count()
    with raises, redirect_stderr(terminal), h.progress():
        h(100 * X)
    assert threading.active_count() <= before
    assert "failures=1" in terminal.getvalue()


def test_nothing_where_there_is_no_terminal(capsys):
    h = sgtrick.from_numpy(engines.normal)
    with h.progress(total=1):
        h(X)
    assert capsys.readouterr() == ("", "")


def test_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    message = r"progress needs tqdm.*sgtrick\[progress\].*pip install"
    with pytest.raises(ImportError, match=message), sgtrick.from_numpy(engines.normal).progress():
        pass
