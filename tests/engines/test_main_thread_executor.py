"""Work that is done on the thread that made an executor, while a function runs on another one."""

import concurrent.futures
import contextvars
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


@pytest.mark.parametrize("threads", [1, 8])
def test_a_thousand_calls(executor, threads):
    done = []

    def compute():
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            work = list(pool.map(lambda i: executor.submit(done.append, i), range(1000)))
        concurrent.futures.wait(work)

    executor.run(compute)
    assert sorted(done) == list(range(1000))
    assert threads > 1 or done == sorted(done)


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
    def work():
        return executor.submit(threading.get_ident).result()

    assert work() == threading.get_ident()
    assert executor.run(lambda: executor.submit(work).result()) == threading.get_ident()


def test_context_variables_go_along(executor):
    variable = contextvars.ContextVar("variable")
    variable.set(5)
    assert executor.run(variable.get) == 5


def elsewhere(f, *args):
    """On a thread that the executor does not know."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(f, *args).result()


def nothing():
    pass


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda e: e.run(lambda: e.submit(lambda: e.run(nothing)).result()),
         "run was called by work"),
        (lambda e: elsewhere(e.run, nothing), "on the thread that made"),
        (lambda e: elsewhere(e.submit, nothing), r"outside of run.*executor\.run\(lambda"),
    ],
)  # fmt: skip
def test_refuses(executor, use, message):
    with pytest.raises(RuntimeError, match=message):
        use(executor)


@pytest.mark.long
def test_interrupts_end_run_and_the_function():
    """While it waits for work, while it works, and at any time, such as between the calls.

    Other threads make it likely that it strikes there.
    """
    script = f"""
        import os, random, signal, threading, time
        from sgtrick._host.executors import MainThreadExecutor

        def interrupt(most):
            time.sleep(random.random() * most)
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
        for works in (False, True):
            executor, ended = MainThreadExecutor(), threading.Event()

            def compute():
                working = executor.submit(time.sleep, 60) if works else None
                time.sleep(0.3)
                interrupt(0)
                time.sleep(0.3)
                try:
                    (working or executor.submit(print, "not served")).result()
                finally:
                    ended.set()

            try:
                executor.run(compute)
            except KeyboardInterrupt as error:
                assert ended.wait({HANGS})
                assert "ended at its next call" in str(error)
                print("interrupted")

        def work():
            while True:
                sum(range(1000))

        def calls():
            threading.Thread(target=interrupt, args=[0.05]).start()
            while True:
                executor.submit(int).result()

        random.seed(1)
        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        for _ in range(50):
            executor = MainThreadExecutor()
            try:
                executor.run(calls)
            except KeyboardInterrupt:
                continue
        print("interrupted at any time")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    want = "interrupted\ninterrupted\ninterrupted at any time\n"
    assert finished.stdout == want, finished.stderr
