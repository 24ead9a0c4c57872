"""`device=` arguments: a name, a list of preferences, or None for the surrounding scope."""

import contextlib
import functools

import tensorflow as tf

from sgtrick._types import Device, Tensor


def scope(device: Device) -> contextlib.AbstractContextManager[object]:
    """Returns a `tf.device` scope of the first choice that is present, an empty one for None.

    TensorFlow's soft placement would silently use the CPU if a GPU is absent.

    Raises:
        ValueError: None of the devices is present, or a name cannot be parsed.
    """
    if device is None:
        return contextlib.nullcontext()
    choices = list(device) if isinstance(device, (list, tuple)) else [device]
    present = [d.name for d in tf.config.list_logical_devices()]
    for choice in map(_parse, choices):
        for name in present:
            if _matches(choice, tf.DeviceSpec.from_string(name)):
                return tf.device(name)  # type: ignore[no-any-return]
    raise ValueError(
        f"device={device!r} is not present. Available devices: "
        f"{[name.removeprefix('/device:') for name in present]}. Pass one of these, a list of "
        "preferences such as ['GPU', 'CPU'], or None for the surrounding tf.device scope."
    )


def of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Returns a scope of the device that a tensor is on, or in a graph was requested for it."""
    return tf.device(tensor.device) if _several() else contextlib.nullcontext()


@functools.cache
def _several() -> bool:
    return len(tf.config.list_logical_devices()) > 1


def _parse(choice: Device) -> tf.DeviceSpec:
    if isinstance(choice, str):
        try:
            choice = tf.DeviceSpec.from_string(choice)
        except ValueError as error:
            raise ValueError(
                f"device={choice!r} is not a device name. Pass a name such as 'CPU:0', 'GPU' or "
                "'/device:GPU:1'."
            ) from error
    if not isinstance(choice, tf.DeviceSpec):
        raise TypeError(
            "device must be a name such as 'GPU:0', a tf.DeviceSpec, a list of these, or None, "
            f"got {choice!r}."
        )
    return choice


# Where a process is alone, TensorFlow lists its devices without these.
_ALONE = {"job": "localhost", "replica": 0, "task": 0}


def _matches(choice: Device, present: tf.DeviceSpec) -> bool:
    for field in ("job", "replica", "task", "device_type", "device_index"):
        wanted, there = getattr(choice, field), getattr(present, field)
        if wanted is not None and wanted != (_ALONE.get(field) if there is None else there):
            return False
    return True
