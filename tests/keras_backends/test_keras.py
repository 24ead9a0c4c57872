"""`sgtrick.keras` on the other backends of Keras than TensorFlow, on which its tests run by themselves.

The choice is made once, so each backend has its own process.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import sgtrick.keras

HERE = Path(__file__).parent

# Warnings of Keras and torch about themselves; torch.compile makes some while it looks at code.
OF_THE_BACKENDS = [
    "<class 'torch.autograd.function.Function'> should not be instantiated:DeprecationWarning",
    "The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning",
]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_backend(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: pip install sgtrick[keras-{backend}]")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"),
            *(f"-W=ignore:{warning}" for warning in OF_THE_BACKENDS),
            *(f"--ignore={__file__}", HERE),
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


def test_a_backend_without_derivatives_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(NotImplementedError, match="tensorflow, jax or torch, got numpy"):
        sgtrick.keras.custom_gradient(1.0, 1.0, 1.0)
