"""Versions and devices for bug reports."""

import importlib.metadata
import platform

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

    Packages are not imported; those that are not installed are shown as `-`.
    """
    rows = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _DISTRIBUTIONS:
        try:
            rows[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            rows[name] = "-"
    rows["devices"] = ", ".join(
        f"{device.device_type}:{device.name.rpartition(':')[2]}"
        for device in tf.config.list_physical_devices()
    )
    for name, value in rows.items():
        print(f"{name:24}{value}")
