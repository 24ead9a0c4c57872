"""`device=` arguments: a name, a list of preferences, or None for the surrounding scope."""

import contextlib
import functools
from collections.abc import Sequence

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
    present = [tf.DeviceSpec.from_string(d.name) for d in tf.config.list_logical_devices()]
    for choice in map(_parse, choices):
        for candidate in present:
            if _matches(choice, candidate):
                return tf.device(candidate.to_string())  # type: ignore[no-any-return]
    raise ValueError(
        f"device={device!r} is not present. Available devices: "
        f"{[f'{d.device_type}:{d.device_index}' for d in present]}. Pass one of these, a list of "
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


def _matches(choice: Device, present: tf.DeviceSpec) -> bool:
    fields: Sequence[str] = ("job", "replica", "task", "device_type", "device_index")
    pairs = [(getattr(choice, field), getattr(present, field)) for field in fields]
    return all(wanted is None or there is None or wanted == there for wanted, there in pairs)
