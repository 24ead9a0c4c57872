"""Versions and devices for bug reports."""

import importlib.metadata
import platform
import sys

import tensorflow as tf

# Packages that results may depend on, in the order of the table.
_DISTRIBUTIONS = (
    "sgtrick",
    "tensorflow",
    "tensorflow-probability",
    "numpy",
    "keras",
    "tf-keras",
    "jax",
    "torch",
    "scipy",
)


def show_versions() -> None:
    """Prints the versions and devices that a bug report needs, as a table.

        >>> import sgtrick
        >>> sgtrick.show_versions()  # doctest: +ELLIPSIS
        python                  3...
        platform                ...
        sgtrick                 ...
        tensorflow              2...

    The versions of packages are those that are imported, nightly builds too; of others, those that
    are installed, or `-`. None is imported.
    """
    rows = {"python": platform.python_version(), "platform": platform.platform()}
    rows |= {name: _version(name) for name in _DISTRIBUTIONS}
    rows["devices"] = ", ".join(
        f"{device.device_type}:{device.name.rpartition(':')[2]}"
        for device in tf.config.list_physical_devices()
    )
    for name, value in rows.items():
        print(f"{name:24}{value}")


def _version(name: str) -> str:
    version = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
    if version is not None:
        return str(version)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"
