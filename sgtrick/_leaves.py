"""Structures flattened to leaves that know their path, dtype and shape, and the errors of these."""

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick import _dtypes, _shapes


class Leaf(NamedTuple):
    """One leaf of `x` with the Jacobian by it."""

    path: str  # its place in the structure: "['a'][0]"
    x: Any  # tensor, B + D
    gx: Any  # tensor, B + R + D, of the dtype in which it multiplies x
    batch_ndims: Any  # len(B): an int, or an int32 tensor where it hangs on unknown ranks


def flatten(structure: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields `(path, leaf)` in the order of `tf.nest.flatten`; lists and tuples look alike."""
    if isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from flatten(structure[key], f"{path}[{key!r}]")
    elif isinstance(structure, (list, tuple)):
        for i, child in enumerate(structure):
            yield from flatten(child, f"{path}[{i}]")
    elif is_object(structure):
        yield from flatten(tf.nest.flatten(structure), path)
    else:
        yield path, structure


def is_object(structure: Any) -> bool:
    """Whether `tf.nest` takes this object apart: attrs classes, dataclasses that say how."""
    return hasattr(structure, "__attrs_attrs__") or hasattr(structure, "__tf_flatten__")


def pair(x: Any, gx: Any, x_name: str = "x", gx_name: str = "gx") -> list[tuple[str, Any, Any]]:
    """Returns `(path, leaf of x, leaf of gx)` for every leaf.

    As in TFP, a list of one also stands for the leaf it holds.
    """
    xs, gxs = list(flatten(x)), list(flatten(gx))
    if [path for path, _ in xs] == [path for path, _ in gxs]:
        return [(path, x, gx) for (path, x), (_, gx) in zip(xs, gxs, strict=True)]
    if len(xs) == len(gxs) == 1 and {xs[0][0], gxs[0][0]} == {"", "[0]"}:
        return [(*xs[0], gxs[0][1])]
    raise ValueError(
        f"{gx_name} must have the structure of {x_name}.\n"
        f"  leaves of {x_name}: {', '.join(x_name + path for path, _ in xs) or 'none'}\n"
        f"  leaves of {gx_name}: {', '.join(gx_name + path for path, _ in gxs) or 'none'}"
    )


def pair_hessian(hx: Any, x: Any, differentiated: Container[str]) -> dict[str, Any]:
    """Returns the blocks of a Hessian by path, `{"[0]['a']": block}`.

    Args:
        hx: A structure of structures, None for a zero block.
        x: The point.
        differentiated: The paths of the leaves of `x` that have a Jacobian.

    Raises:
        ValueError: It is no such structure, or has a block without its transpose or Jacobian.
    """
    paths = [path for path, _ in flatten(x)]
    blocks = dict(flatten(hx))
    expected = [p + q for p in paths for q in paths]
    if list(blocks) != expected:
        raise ValueError(
            "hx must hold a structure like x for each leaf of x, as jax.hessian returns it.\n"
            f"  expected: {', '.join('hx' + path for path in expected)}\n"
            f"  got:      {', '.join('hx' + path for path in blocks) or 'none'}"
        )
    for p in paths:
        for q in paths:
            if blocks[p + q] is None:
                if blocks[q + p] is not None:
                    raise ValueError(
                        f"hx{p}{q} is None but its transpose hx{q}{p} is not. Pass both, or None "
                        "for both where they are zero."
                    )
            elif p not in differentiated or q not in differentiated:
                raise ValueError(
                    f"hx{p}{q} is given, but gx{p if p not in differentiated else q} is None: "
                    "what has no first derivative has no second. Pass None there."
                )
    return blocks


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def make_leaf(path: str, x: Any, gx: Any, fx: Any, batch_ndims: Any, names: _shapes.Names) -> Leaf:
    """Converts one leaf of `x` and the Jacobian of the tensor `fx` by it, and checks the contract.

    Raises:
        TypeError: A dtype without derivatives, or a complex derivative of something real.
        ValueError: The shapes do not fit together.
    """
    x = to_tensor(x, names.x)
    dtype = tf.as_dtype(_dtypes.of_jacobian(fx.dtype.name, x.dtype.name, names))
    gx = to_dtype(gx, dtype, names.gx, f"{names.fx} is {fx.dtype.name}, {names.x} {x.dtype.name}")
    shapes = static_shape(fx), static_shape(gx), static_shape(x)
    if not tf.is_tensor(batch_ndims):
        batch_ndims = _shapes.infer_batch_ndims(*shapes, batch_ndims, names)
    if not _shapes.is_known(*shapes):
        gx, batch_ndims = _check_at_run_time(fx, gx, x, batch_ndims, names)
    elif gx.shape.rank < x.shape.rank:
        gx = tf.broadcast_to(gx, x.shape)  # rank 0: the same partial for every entry
    return Leaf(path, x, gx, batch_ndims)


def is_dense(leaf: Any) -> bool:
    """Whether a leaf is a dense tensor, or a variable, which stands for one."""
    return isinstance(leaf, (tf.Tensor, tf.Variable)) or hasattr(leaf, "__tf_tensor__")


def is_differentiable(dtype: Any) -> bool:
    """Whether values of this dtype have derivatives."""
    return bool(dtype.is_floating or dtype.is_complex)


def to_dtype(value: Any, dtype: Any, name: str, why: str) -> Any:
    """Returns a numeric `value` as a tensor of `dtype`, never dropping an imaginary part."""
    # A bare Python number would lose digits by way of float32.
    value = to_tensor(value, name, dtype=dtype if type(value) in (int, float) else None)
    _dtypes.check_cast(value.dtype.name, dtype.name, name, why)
    return tf.cast(value, dtype)


def to_tensor(value: Any, name: str, *, dtype: Any = None) -> Any:
    """`tf.convert_to_tensor` whose errors name the argument."""
    came = getattr(value, "dtype", None)
    if isinstance(came, tf.DType) and came.base_dtype != came:
        raise TypeError(
            f"{name} is a reference variable of TensorFlow 1, which cannot carry a custom "
            "gradient. Make it with use_resource=True."
        )
    if dtype is None and isinstance(value, tf.Tensor):
        return value
    try:
        return tf.convert_to_tensor(value, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise no_tensor(value, name, error) from error


# Of a Hessian-vector product on this backend.
NOT_CONNECTED = (
    "hx(v) is not connected to v, so the second derivative would be lost. {0} must be able to "
    "differentiate it. Where it calls code outside {0}, give it its own gradient: H is symmetric, "
    "so that the gradient of v -> H v is u -> H u."
)


def no_tensor(value: Any, name: str, error: Exception) -> TypeError:
    """What is raised where `value` cannot be converted."""
    return TypeError(
        f"{name} must be a tensor, variable, array or number, got {type(value).__name__}: {error}"
    )


def static_shape(tensor: Any) -> _shapes.Shape | None:
    """What is known of a tensor's shape without running it."""
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def insist(fits: Any, tensor: Any, message: str, *others: Any) -> Any:
    """Returns `tensor`; a run-time error with its and the others' shapes where `fits` is false."""
    shape = tf.shape(tensor)
    check = tf.debugging.Assert(fits, [message, shape, *map(tf.shape, others)], summarize=16)
    with tf.control_dependencies([check]):
        # XLA leaves assertions out; there the impossible size is the error.
        impossible = tf.fill([tf.where(fits, 0, 1)], -2)
        checked = tf.reshape(tensor, tf.concat([shape, impossible], 0))
    checked.set_shape(tensor.shape)
    return checked


def shaped_like(tensor: Any, like: Any, name: str, like_name: str) -> Any:
    """Returns `tensor`, checked to have the shape of `like`: while tracing where that is known.

    Raises:
        ValueError: The shapes cannot be equal.
    """
    shape, expected = static_shape(tensor), static_shape(like)
    _shapes.check_equal(shape, expected, name, like_name)
    if _shapes.is_known(shape, expected):
        return tensor
    fits = equal_shapes(tf.shape(tensor), tf.shape(like))
    message = f"These shapes, of {name} and of what it must be like, differ:"
    return insist(fits, tensor, message, like)


def equal_shapes(a: Any, b: Any) -> Any:
    """Whether two shape vectors, perhaps of different lengths, are equal."""
    n = tf.minimum(tf.size(a), tf.size(b))
    return tf.equal(tf.size(a), tf.size(b)) & tf.reduce_all(tf.equal(a[:n], b[:n]))


def _check_at_run_time(
    fx: Any, gx: Any, x: Any, batch_ndims: Any, names: _shapes.Names
) -> tuple[Any, Any]:
    """The contract of `_shapes` in graph ops: returns `gx` and `len(B)`."""
    fx_shape, gx_shape, x_shape = tf.shape(fx), tf.shape(gx), tf.shape(x)
    b = batch_ndims
    if b is None:
        b = tf.where(tf.equal(tf.rank(gx), tf.rank(x)), tf.rank(fx), 0)
    if fx.shape.rank in (0, None) and gx.shape.rank in (0, None):
        # The same partial for every entry, if both turn out to have rank 0.
        n = tf.where(tf.equal(tf.rank(fx) + tf.rank(gx), 0), tf.rank(x), 0)
        gx_shape = tf.concat([x_shape[:n], gx_shape], 0)
        gx = tf.broadcast_to(gx, gx_shape)
    fits = (
        tf.equal(tf.size(fx_shape[:b]), b)
        & equal_shapes(fx_shape[:b], x_shape[:b])
        & equal_shapes(gx_shape, tf.concat([fx_shape, x_shape[b:]], 0))
    )
    message = (
        f"The shapes of {names.gx}, {names.fx} and {names.x}, in this order, do not fit together. "
        "With batch, range and domain shapes B, R and D they must be B + R + D, B + R and B + D:"
    )
    gx = insist(fits, gx, message, fx, x)
    if isinstance(b, int):
        gx.set_shape(fx.shape.concatenate(x.shape[b:]))
    return gx, b
