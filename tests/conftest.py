import gc
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))  # what folders share, for xdist too


def pytest_configure(config):
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _prepare()  # and not in a process that only hands tests out to others


def _prepare():
    import matrix

    matrix.configure()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Neighbours on one worker, which share what was imported, made and converted."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish():
    """What was imported is never freed: no collection of garbage need look through it again."""
    _freeze()
    gc.set_threshold(20_000, 20, 20)  # graphs are made of many objects


def pytest_runtest_teardown(item, nextitem):
    """Nor need one look through what a module of tests has left in TensorFlow."""
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _freeze():
    gc.collect()
    gc.freeze()


@pytest.fixture
def formula_alone(monkeypatch):
    """Without the pullback that most tapes take in the formula's place."""
    from sgtrick import _custom_gradient
    from sgtrick._core.formula import formula

    def embed(name, fx, leaves, hessian, stopped):
        times = getattr(hessian, "times", None)
        order = None if hessian is None else 1 if times is None else 2
        return formula(fx, leaves, times, order=order, stopped=stopped) if leaves else fx

    monkeypatch.setattr(_custom_gradient, "_differentiable", embed)
