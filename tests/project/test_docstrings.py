"""Every docstring example runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import sgtrick
import sgtrick.keras
import sgtrick.tfp

NEEDS = {
    "sgtrick._host.from_framework": ("jax", "torch"),
    "sgtrick._host.jax": ("jax",),
    "sgtrick._host.native": ("jax",),
    "sgtrick._host.torch": ("torch",),
}
MODULES = [m.name for m in pkgutil.walk_packages(sgtrick.__path__, "sgtrick.")]


@pytest.mark.parametrize("name", [name for name in MODULES if "keras._" not in name])
def test_examples(name):
    for extra in NEEDS.get(name, ()):
        pytest.importorskip(extra)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("module", [sgtrick, sgtrick.keras, sgtrick.tfp])
def test_every_public_name_has_an_example(module):
    for name in module.__all__:
        tests = doctest.DocTestFinder(recurse=False).find(getattr(module, name), name)
        assert any(test.examples for test in tests), name
