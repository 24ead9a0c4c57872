"""The bar of calls, while compiled code runs."""

import io
import os
import re
import sys
import threading
import time
from contextlib import redirect_stderr

import numpy as np
import pytest
import tensorflow as tf

import engine_functions as engines
import sgtrick
from hanging import HANGS
from sgtrick._host import progress

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
            assert seen.wait(HANGS)
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


@pytest.mark.parametrize("where", ["log", "terminal without a size"])
def test_lines_where_there_is_no_room_for_a_bar(monkeypatch, where):
    """Ever fewer of them."""
    if where == "log":
        stream = io.StringIO()
    else:
        stream = Terminal()
        stream.fileno = lambda: 2
        monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((0, 0)))
    monkeypatch.setattr(progress, "_INTERVAL", 0.005)
    monkeypatch.setattr(progress, "_PAUSE", 0.02)
    monkeypatch.setattr(progress, "_GROWTH", 1.0)
    h = sgtrick.from_numpy(engines.fails_beyond_one, on_error=-np.inf)
    begin = time.monotonic()
    with redirect_stderr(stream), h.progress(total=4, desc="warm-up"):
        h(tf.constant([[2.0, 0.0], [0.0, 0.0]]))
        while stream.getvalue().count("\n") < 4:
            time.sleep(0.01)
    passed = time.monotonic() - begin
    *lines, last = stream.getvalue().splitlines()
    assert 0.02 * 2 ** (len(lines) - 1) <= passed
    assert all(re.fullmatch(
        r"warm-up: [012] of 4 calls in \d+ s, \S+ a second(, 1 failure)?", line) for line in lines
    )  # fmt: skip
    assert re.fullmatch(r"warm-up: 2 of 4 calls in \d+ s, \S+ a second, 1 failure", last)


def test_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    message = r"progress needs tqdm.*sgtrick\[progress\].*pip install"
    with pytest.raises(ImportError, match=message), sgtrick.from_numpy(engines.normal).progress():
        pass
