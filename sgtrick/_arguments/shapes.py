"""The shape contract between a value, its Jacobian and the point, and its errors.

With batch shape `B`, range `R` and domain `D`:

    fx: B + R        x: B + D        gx: B + R + D

Only `len(B)`, the number of batch dimensions, is ever in doubt, so only that is inferred here.
Shapes are tuples in which None is an unknown dimension; None instead of a shape is an unknown rank.
This module does not depend on TensorFlow.
"""

import numbers
from typing import NamedTuple, TypeGuard

Shape = tuple[int | None, ...]


class Names(NamedTuple):
    """The caller's names of the value, the Jacobian and the point: `fx`, `gx['a']`, `x['a']`."""

    fx: str
    gx: str
    x: str


def infer_batch_ndims(
    fx: Shape | None, gx: Shape | None, x: Shape | None, batch_ndims: int | None, names: Names
) -> int | None:
    """Returns `len(B)`, checking every dimension that is known.

    If `gx` has the rank of `x`, it is the gradient of each batch member, so all of `fx` is batch;
    if its rank is the sum of those of `fx` and `x`, it is the full Jacobian of a function without a
    batch. An `fx` of one entry is one value, unless `x` is a batch of one, too.

    Args:
        fx: Shape of the value, `B + R`.
        gx: Shape of the Jacobian, `B + R + D`; for one value also the shape of `x`, or rank 0: the
            same partial derivative for every entry of `x`.
        x: Shape of the point, `B + D`.
        batch_ndims: `len(B)` if the caller passed it, None to infer it.
        names: For errors.

    Returns:
        `len(B)`, or None if it depends on a rank that is not known yet, or on whether `fx` has one
        entry, where `x` is known to be no batch of one.

    Raises:
        ValueError: The shapes do not fit together, or `batch_ndims` is not a number of dimensions.
    """
    inferred = batch_ndims
    if inferred is not None and (not is_int(inferred) or inferred < 0):
        raise ValueError(
            f"batch_ndims must be None or an int of at least 0, got {show_option(batch_ndims)}."
        )
    if inferred is None:
        if fx == ():
            inferred = 0
        elif fx is None or gx is None or x is None:
            return None
        else:
            inferred = len(fx) if len(gx) == len(x) and _is_batch(fx, x[: len(fx)]) else 0
    if not _fits(fx, gx, x, inferred):
        raise ValueError(
            f"{names.fx} {show(fx)}, {names.gx} {show(gx)} and {names.x} {show(x)} do not fit "
            f"together. {_advice(fx, gx, x, batch_ndims, names)}"
        )
    if batch_ndims is None and inferred and fx and x and _may_be_one(fx):
        return inferred if _may_be_one(x[:inferred]) else None
    return int(inferred)


def is_int(value: object) -> TypeGuard[int]:
    """Whether this is an int, such as a number of dimensions or a position, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_equal(shape: Shape | None, expected: Shape | None, name: str, like_name: str) -> None:
    """Checks that two shapes may be equal."""
    if shape is not None and expected is not None and not compatible(shape, expected):
        raise ValueError(
            f"{name} has shape {show(shape)}, {like_name} {show(expected)}. The two must be equal."
        )


def is_one(fx: Shape | None) -> bool:
    """Whether a value is known to have one entry."""
    return fx is not None and all(n == 1 for n in fx)


def is_known(*shapes: Shape | None) -> bool:
    """Whether the shapes are fully defined, so that there is nothing to check at run time."""
    return all(shape is not None and None not in shape for shape in shapes)


def compatible(a: Shape, b: Shape) -> bool:
    """Whether two shapes may be equal."""
    return len(a) == len(b) and all(
        m is None or n is None or m == n for m, n in zip(a, b, strict=True)
    )


def show_option(value: object) -> str:
    """An option as it is printed in errors: tensors and other objects by their type alone."""
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__


def show(shape: Shape | None) -> str:
    """A shape as it is printed in errors: `[3, ?]`."""
    if shape is None:
        return "[unknown rank]"
    return "[" + ", ".join("?" if n is None else str(n) for n in shape) + "]"


def _may_be_one(fx: Shape) -> bool:
    """Whether a value may have one entry."""
    return all(n in (1, None) for n in fx)


def _is_batch(fx: Shape, front: Shape) -> bool:
    """Whether a value is taken for a batch like the `front` of the point, and not for one value."""
    if is_one(fx):
        return front == fx
    return not _may_be_one(fx) or compatible(fx, front)


def _fits(fx: Shape | None, gx: Shape | None, x: Shape | None, batch_ndims: int) -> bool:
    if any(shape is not None and len(shape) < batch_ndims for shape in (fx, x)):
        return False
    if fx is None or x is None:
        return True
    if not compatible(fx[:batch_ndims], x[:batch_ndims]):
        return False
    if gx is None or compatible(gx, fx + x[batch_ndims:]):
        return True
    return _may_be_one(fx) and batch_ndims == 0 and (gx == () or compatible(gx, x))


def _advice(
    fx: Shape | None, gx: Shape | None, x: Shape | None, batch_ndims: int | None, names: Names
) -> str:
    if batch_ndims is not None:
        stated = f"With batch_ndims={batch_ndims}"
        if fx is None or x is None or min(len(fx), len(x)) < batch_ndims:
            return (
                f"{stated}, {names.fx} and {names.x} need at least {batch_ndims} dimensions. In "
                "tf.vectorized_map and AutoBatched joint distributions, which pass one member at a "
                "time, leave batch_ndims out."
            )
        if not compatible(fx[:batch_ndims], x[:batch_ndims]):
            return (
                f"{stated}, the leading dimensions of {names.fx} and {names.x} must be equal, "
                f"got {show(fx[:batch_ndims])} and {show(x[:batch_ndims])}."
            )
        return f"{stated}, {names.gx} must have the shape {show(fx + x[batch_ndims:])}."
    assert fx is not None
    assert x is not None
    fitting = []
    if is_one(fx) or compatible(fx, x[: len(fx)]):
        of = "a scalar" if is_one(fx) else "each batch member"
        fitting.append(f"{names.gx} {show(x)} (the gradient of {of})")
    if fx:
        fitting.append(f"{names.gx} {show(fx + x)} (the full Jacobian)")
    if gx is not None and compatible(gx, x):
        batches = " or ".join(show(x[:n]) for n in range(len(x) + 1))
        fitting.append(f"{names.fx} {batches} (the leading dimensions of {names.x} as batch)")
    return (
        f"Expected {'one of: ' if len(fitting) > 1 else ''}{'; '.join(fitting)}. If {names.fx} has "
        "both batch and range dimensions, pass batch_ndims."
    )
