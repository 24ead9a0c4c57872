"""Every docstring example runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import sgtrick

MODULES = [m.name for m in pkgutil.walk_packages(sgtrick.__path__, "sgtrick.")]


@pytest.mark.parametrize("name", [name for name in MODULES if "keras._" not in name])
def test_examples(name):
    if name == "sgtrick._frameworks":
        pytest.importorskip("torch")
        pytest.importorskip("jax")
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_function_has_an_example():
    for name in sgtrick.__all__:
        public = getattr(sgtrick, name)
        if not isinstance(public, type):
            tests = doctest.DocTestFinder(recurse=False).find(public, name)
            assert any(test.examples for test in tests), name
