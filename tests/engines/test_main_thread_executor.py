import concurrent.futures
import subprocess
import sys
import textwrap
import threading

import pytest

import sgtrick
from hanging import HANGS


@pytest.fixture
def executor():
    return sgtrick.MainThreadExecutor()


def test_work_runs_on_the_thread_that_made_it_and_the_function_elsewhere(executor):
    here = threading.get_ident()

    def compute():
        return threading.get_ident(), executor.submit(threading.get_ident).result()

    worker, server = executor.run(compute)
    assert server == here
    assert worker != here


def test_a_thousand_calls_in_order_from_one_thread(executor):
    done = []

    def compute():
        futures = [executor.submit(done.append, i) for i in range(1000)]
        concurrent.futures.wait(futures)

    executor.run(compute)
    assert done == list(range(1000))


def test_a_thousand_calls_from_eight_threads(executor):
    def compute():
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            calls = [lambda i=i: executor.submit(pow, i, 2).result() for i in range(1000)]
            return list(pool.map(lambda call: call(), calls))

    assert executor.run(compute) == [i**2 for i in range(1000)]


def test_map_and_arguments(executor):
    assert executor.run(lambda a, *, b: [*executor.map(pow, [a, b], [2, 2])], 3, b=4) == [9, 16]


def test_an_exception_of_work_reaches_whoever_waits_and_the_next_work_is_done(executor):
    def compute():
        with pytest.raises(ZeroDivisionError):
            executor.submit(lambda: 1 / 0).result()
        return executor.submit(lambda: "next").result()

    assert executor.run(compute) == "next"


def test_an_exception_of_the_function_is_raised_by_run(executor):
    with pytest.raises(ZeroDivisionError):
        executor.run(lambda: 1 / 0)
    assert executor.run(lambda: "again") == "again"


def test_cancelled_work_is_not_done(executor):
    done, gate = [], threading.Event()

    def compute():
        first = executor.submit(gate.wait, 10)
        second = executor.submit(done.append, "second")
        assert second.cancel()
        gate.set()
        return first.result()

    assert executor.run(compute)
    assert done == []


def test_on_its_own_thread_work_is_done_at_once(executor):
    assert executor.submit(threading.get_ident).result() == threading.get_ident()

    def work():
        return executor.submit(threading.get_ident).result()

    assert executor.run(lambda: executor.submit(work).result()) == threading.get_ident()


def test_context_variables_go_along(executor):
    import contextvars

    variable = contextvars.ContextVar("variable")
    variable.set(5)
    assert executor.run(variable.get) == 5


class TestRefuses:
    def test_run_within_run(self, executor):
        def compute():
            executor.submit(lambda: executor.run(lambda: None)).result()

        with pytest.raises(RuntimeError, match="run was called by work"):
            executor.run(compute)

    def test_run_on_another_thread(self, executor):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(executor.run, lambda: None)
        with pytest.raises(RuntimeError, match="on the thread that made"):
            future.result()

    def test_work_that_nobody_serves(self, executor):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(executor.submit, lambda: None)
        with pytest.raises(RuntimeError, match=r"outside of run.*executor\.run\(lambda"):
            future.result()


def test_in_a_with_statement():
    with sgtrick.MainThreadExecutor() as executor:
        assert executor.run(lambda: executor.submit(lambda: 1).result()) == 1


@pytest.mark.long
def test_an_interrupt_ends_run_and_the_function():
    """While it waits for work, and while it works."""
    script = f"""
        import os, signal, threading, time
        from sgtrick._host.executors import MainThreadExecutor

        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
        for works in (False, True):
            executor, ended = MainThreadExecutor(), threading.Event()

            def compute():
                working = executor.submit(time.sleep, 60) if works else None
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)
                try:
                    (working or executor.submit(print, "not served")).result()
                finally:
                    ended.set()

            try:
                executor.run(compute)
            except KeyboardInterrupt:
                assert ended.wait({HANGS})
                print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert finished.stdout == 2 * "interrupted\n", finished.stderr
