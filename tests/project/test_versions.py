import importlib.metadata
import platform
import sys
import types

import tensorflow as tf

import sgtrick


def test_the_report_names_what_is_installed(capsys):
    sgtrick.show_versions()
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["python"] == platform.python_version()
    assert rows["tensorflow"] == tf.__version__
    assert rows["numpy"] == importlib.metadata.version("numpy")
    assert rows["devices"].startswith("CPU:0")


def test_what_is_not_installed_is_a_dash(capsys, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "jax", raising=False)  # imported ones count
    sgtrick.show_versions()
    assert "jax                     -\n" in capsys.readouterr().out


def test_what_is_imported_counts(capsys, monkeypatch):
    """A nightly build is another distribution of the same package."""
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(__version__="0.99.dev1"))
    sgtrick.show_versions()
    assert "jax                     0.99.dev1\n" in capsys.readouterr().out
