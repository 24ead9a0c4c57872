import importlib.metadata
import platform

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
    sgtrick.show_versions()
    assert "jax                     -\n" in capsys.readouterr().out
