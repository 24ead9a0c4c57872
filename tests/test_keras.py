"""`sgtrick.keras` on each backend of Keras. The choice is made once, so each has its own process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import sgtrick.keras

HERE = Path(__file__).parent / "keras_backends"

BACKENDS = ["tensorflow", "jax", "torch"]
FILES = {  # which files of tests run on which backends
    "values": BACKENDS,
    "rules": BACKENDS,
    "models": BACKENDS,
    "storage": BACKENDS,
    "exported": BACKENDS,
    "compiled": ["torch"],
    "hosts": BACKENDS,
}
HELPERS = {"transformations", "stored"}

# Warnings of Keras and torch about themselves; torch.compile makes some while it looks at code.
OF_THE_BACKENDS = [
    "__array__ implementation doesn't accept a copy keyword:DeprecationWarning",
    "`torch.jit.script` is deprecated:DeprecationWarning",
    "<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
    "The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning",
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: pip install sgtrick[keras-{backend}]")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"),
            *(f"-W=ignore:{warning}" for warning in OF_THE_BACKENDS),
            # Named, since pytest does not collect these names by itself.
            *(HERE / f"{file}.py" for file in FILES if backend in FILES[file]),
        ],
        cwd=HERE.parents[1],
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
            "KERAS_BACKEND": backend,
            "KERAS_HOME": str(tmp_path),
            "JAX_ENABLE_X64": "1",  # Keras looks when it is imported
            "TF_CPP_MIN_LOG_LEVEL": "3",
            # Small things, compiled by the hundred.
            "XLA_FLAGS": "--xla_backend_optimization_level=0" if backend == "jax" else "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_file_is_forgotten():
    assert {path.stem for path in HERE.glob("*.py")} == FILES.keys() | HELPERS


def test_a_backend_without_derivatives_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(NotImplementedError, match="tensorflow, jax or torch, got numpy"):
        sgtrick.keras.custom_gradient(1.0, 1.0, 1.0)
