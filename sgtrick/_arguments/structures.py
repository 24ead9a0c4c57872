"""Structures as leaves with paths; checks of leaves whose errors name them by path."""

import array
import functools
from collections.abc import (
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
)
from typing import Any, NamedTuple, TypeGuard

import tensorflow as tf

from sgtrick._arguments import dtypes, shapes
from sgtrick._types import (
    DType,
    DTypeLike,
    Function,
    Gradient,
    Ndims,
    Structure,
    Tensor,
    TensorLike,
)


class Leaf(NamedTuple):
    """One leaf of `x` and the Jacobian with respect to it."""

    path: str  # its place in the structure: "['a'][0]"
    x: Tensor  # B + D
    gx: Tensor  # B + R + D, in the dtype of products
    batch_ndims: Ndims  # len(B)


def flatten(
    structure: Structure, path: str = "", whole: Container[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields `(path, leaf)` in the order of `tf.nest.flatten`; lists and tuples look the same.

    Lists of numbers at the paths `whole` are leaves.
    """
    if isinstance(structure, tf.Tensor):
        yield path, structure
    elif isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from flatten(structure[key], f"{path}[{key!r}]", whole)
    elif path in whole and is_list_of_numbers(structure):
        yield path, structure
    elif is_sequence(structure):
        for i, child in enumerate(structure):
            yield from flatten(child, f"{path}[{i}]", whole)
    elif is_object(structure):
        yield from flatten(tf.nest.flatten(structure), path, whole)
    else:
        yield path, structure


# What `tf.nest.is_nested` says of all but a `Mapping`: torch.compile cannot trace that function.
def is_sequence(structure: object) -> TypeGuard[Collection[Any]]:
    """Whether `tf.nest` takes this for a sequence: lists, deques, ranges, views of dicts."""
    if isinstance(structure, (list, tuple)):
        return True
    is_text = isinstance(structure, (str, bytes))
    return not is_text and isinstance(structure, (Sequence, MappingView))


def is_object(structure: object) -> bool:
    """Whether `tf.nest` flattens this object: attrs classes, dataclasses with `__tf_flatten__`."""
    return hasattr(structure, "__attrs_attrs__") or hasattr(structure, "__tf_flatten__")


BUFFERS = (array.array, memoryview)  # of numbers, which can hold no tensors


def copied(structure: Structure) -> Structure | None:
    """The structure with the same leaves, in lists and dicts that nobody else changes.

    None, if `tf.nest` cannot build it, since the constructor of a class takes something else.
    Buffers of numbers become lists, as ranges and views of dicts do.
    """
    if isinstance(structure, BUFFERS):
        return list(structure)
    try:
        return tf.nest.map_structure(lambda leaf: leaf, structure)
    except (TypeError, ValueError):
        return None


def no_structure(structure: object, name: str) -> TypeError:
    """The error for a structure that has to be built of other leaves, and cannot be."""
    return TypeError(
        f"{name} is a structure whose leaves have to be replaced, but tf.nest cannot build "
        f"{type(structure).__name__} of others, since its constructor takes something else. "
        "Pass the leaves as arguments, or in another structure."
    )


def pair(
    x: Structure, gx: Structure, x_name: str = "x", gx_name: str = "gx"
) -> list[tuple[str, Any, Any]]:
    """Returns `(path, leaf of x, leaf of gx)` for every leaf.

    As in TFP, a leaf and a list that holds only this leaf are interchangeable, and a leaf in a list
    may meet a nested list of numbers.
    """
    if isinstance(x, tf.Tensor) and isinstance(gx, tf.Tensor):
        return [("", x, gx)]
    xs = list(flatten(x))
    paths = [path for path, _ in xs]
    gxs = list(flatten(gx, whole={*paths, "[0]"} - {""}))
    if [path for path, _ in gxs] == paths:
        return [(path, x, gx) for (path, x), (_, gx) in zip(xs, gxs, strict=True)]
    if len(xs) == len(gxs) == 1 and {xs[0][0], gxs[0][0]} == {"", "[0]"}:
        return [(*xs[0], gxs[0][1])]
    gxs = list(flatten(gx))
    hint = "\nA list is a structure of its entries: for a vector, pass an array."
    raise ValueError(
        f"{gx_name} must have the structure of {x_name}.\n"
        f"  leaves of {x_name}: {', '.join(x_name + path for path, _ in xs) or 'none'}\n"
        f"  leaves of {gx_name}: {', '.join(gx_name + path for path, _ in gxs) or 'none'}"
        + (hint if isinstance(x, list) or isinstance(gx, list) else "")
    )


def pair_hessian(
    hx: Structure, x: Structure, differentiated: Container[str]
) -> dict[str, TensorLike | None]:
    """Returns the blocks of a Hessian by path, `{"[0]['a']": block}`.

    Args:
        hx: A structure of structures, None for a zero block.
        x: The point.
        differentiated: The paths of the leaves of `x` that have a Jacobian.

    Raises:
        ValueError: `hx` has another structure, or a block without its transpose or its Jacobian.
    """
    paths = [path for path, _ in flatten(x)]
    blocks = dict(flatten(hx))
    expected = [p + q for p in paths for q in paths]
    if list(blocks) != expected:
        raise ValueError(
            "hx must have a structure like x for each leaf of x, as jax.hessian returns it.\n"
            f"  expected: {', '.join('hx' + path for path in expected)}\n"
            f"  got:      {', '.join('hx' + path for path in blocks) or 'none'}"
        )
    for p in paths:
        for q in paths:
            if blocks[p + q] is None:
                if blocks[q + p] is not None:
                    raise ValueError(
                        f"hx{p}{q} is None but its transpose hx{q}{p} is not. Pass both, or None "
                        "for both if they are zero."
                    )
            elif p not in differentiated or q not in differentiated:
                raise ValueError(
                    f"hx{p}{q} is given, but gx{p if p not in differentiated else q} is None. "
                    f"Without a first derivative there is no second one: pass None as hx{p}{q}."
                )
    return blocks


def is_dense(leaf: object) -> bool:
    """Whether a leaf is a dense tensor or a variable, or a module that stands for one in TFP."""
    if isinstance(leaf, (tf.Tensor, tf.Variable)) or hasattr(leaf, "__tf_tensor__"):
        return True
    return isinstance(leaf, tf.Module) and bool(tf.is_tensor(leaf))


def holds_tensors(leaf: object) -> bool:
    """Whether a leaf is an object made of tensors: ragged or sparse, a distribution, a layer."""
    if is_dense(leaf):
        return False
    is_composite = all(t is not leaf for t in tf.nest.flatten(leaf, expand_composites=True))
    return is_composite or hasattr(leaf, "trainable_variables")


def numbers_of(leaf: Any) -> Any:
    """The tensor with the numbers of a ragged tensor; any other leaf itself."""
    return leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf


def with_numbers(leaf: Any, numbers: Any) -> Any:
    """A leaf like this one with other numbers; None if there are none."""
    is_ragged = isinstance(leaf, tf.RaggedTensor) and numbers is not None
    return leaf.with_flat_values(numbers) if is_ragged else numbers


def is_differentiable(dtype: DType) -> bool:
    """Whether values of this dtype have derivatives."""
    return bool(dtype.is_floating or dtype.is_complex)


def differentiable(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """The tensors that have derivatives, and None in place of others."""
    return [t if is_differentiable(t.dtype) else None for t in tensors]


def for_sums(t: Tensor) -> Tensor:
    """A real tensor in a dtype whose sums do not overflow as those of half precision do."""
    return tf.cast(t, tf.float32) if t.dtype.size < 4 else t


def has_derivatives(leaf: object) -> bool:
    """Whether a leaf is a floating or complex number, array, tensor or variable."""
    if isinstance(leaf, (float, complex)):
        return True
    dtype = getattr(leaf, "dtype", None)
    try:
        return dtype is not None and is_differentiable(tf.as_dtype(dtype))
    except TypeError:  # a dtype that TensorFlow does not know
        return False


def is_number(leaf: object) -> bool:
    """Whether a leaf is a number, array, tensor or variable, or None instead of one."""
    return leaf is None or isinstance(leaf, (int, float, complex)) or hasattr(leaf, "dtype")


def may_be_recorded(leaf: object) -> bool:
    """Whether a tape may have recorded a dense leaf, which it cannot for numbers and arrays."""
    return has_derivatives(leaf) and is_dense(leaf)


def is_list_of_numbers(value: object) -> bool:
    """Whether this is a list, perhaps of lists, of numbers and tensors alone."""
    if isinstance(value, (list, tuple)):
        return all(is_list_of_numbers(v) or (is_number(v) and v is not None) for v in value)
    return False


def is_python_number(value: object) -> bool:
    """Whether this is a number without a dtype, or a list of such, perhaps of lists."""
    if isinstance(value, (list, tuple)):
        return all(map(is_python_number, value))
    return type(value) in (int, float)


def is_pair(returned: object) -> bool:
    """Whether a function returned a pair."""
    return isinstance(returned, (tuple, list)) and len(returned) == 2


def kind_of(value: object) -> str:
    """A value as it is described in errors: its type and length, not its numbers."""
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, (tuple, list)) else kind


# The attribute of an eager tensor that holds its original: the tensor that it copies, or the
# variable whose value it is. Who asks a tape for the original asks for the tensor.
ORIGIN = "_sgtrick_origin"


def as_tensor(value: TensorLike, dtype: DTypeLike | None = None) -> Tensor:
    """`tf.convert_to_tensor`, which in eager execution notes the variable that it reads."""
    t = tf.convert_to_tensor(value, dtype=dtype)
    if hasattr(value, "assign") and tf.executing_eagerly():
        setattr(t, ORIGIN, value)
    return t


def dense(gradient: Gradient) -> Tensor | None:
    """A gradient as a tensor, if it is `tf.IndexedSlices`."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if gradient.dense_shape is None:
        return tf.convert_to_tensor(gradient)
    count = gradient.dense_shape[0]
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, count)


def to_tensor(
    value: TensorLike,
    name: str,
    *,
    dtype: DTypeLike | None = None,
    beside: Iterable[object] = (),
) -> Tensor:
    """`tf.convert_to_tensor` whose errors name the argument.

    A number of Python has no dtype, and gets that of the leaves beside it, if it is not stated.
    """
    check_supported(value, name)
    if dtype is None:
        dtype = dtypes.of_number(value, (_dtype_of(leaf) for leaf in beside))
    if dtype is None and isinstance(value, tf.Tensor):
        return value
    try:
        return as_tensor(value, dtype)
    except (TypeError, ValueError) as error:
        raise no_tensor(value, name, error) from error


def _dtype_of(leaf: Any) -> str:
    """The dtype with which a leaf is read, or nothing for what has no derivatives or no dtype."""
    if not (hasattr(leaf, "dtype") and has_derivatives(leaf)):
        return ""
    # A Keras layer reads a variable in another dtype than its own.
    dtype = as_tensor(leaf).dtype if hasattr(leaf, "assign") else tf.as_dtype(leaf.dtype)
    return str(dtype.name)


def check_supported(value: Any, name: str) -> None:
    """Raises for a value like a tensor that can carry no custom derivative.

    It is a reference variable of TensorFlow 1, a tensor that refers to one, a placeholder of
    Keras, or a tensor of another framework that is being differentiated there.
    """
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, tf.DType) and dtype.base_dtype != dtype:
        raise TypeError(
            f"{name} is a reference variable of TensorFlow 1, which cannot carry a custom "
            "gradient. Create it with use_resource=True, as tf.compat.v1.get_variable("
            "..., use_resource=True), or call tf.compat.v1.enable_resource_variables() first."
        )
    if type(value).__name__ == "KerasTensor":
        raise TypeError(
            f"{name} is a KerasTensor, which stands for a tensor in a functional model of Keras. "
            "Call the function in the `call` of a layer or in a keras.layers.Lambda; or use "
            "sgtrick.keras, whose functions take it."
        )
    framework = _framework_of(type(value))  # type: ignore[arg-type] # mypy: types have a hash
    if framework == "JAX" or (framework == "PyTorch" and getattr(value, "requires_grad", False)):
        raise TypeError(
            f"{name} is a tensor that {framework} differentiates, and this function is for "
            "TensorFlow. For Keras on this backend, use sgtrick.keras.custom_vjp or "
            "sgtrick.keras.custom_gradient. Otherwise use custom derivatives of "
            f"{framework} itself, or pass tensors of TensorFlow."
        )


@functools.lru_cache
def _framework_of(kind: type) -> str | None:
    """Whose derivatives a value of this type may carry, if not TensorFlow's."""
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__}
    known = {"torch.Tensor": "PyTorch", "jax.Tracer": "JAX"}
    return next((known[name] for name in known if name in names), None)


def no_tensor(value: object, name: str, error: Exception) -> TypeError:
    """The error for a `value` that cannot be converted."""
    reason = f": {error}"
    if holds_tensors(value):
        parts = {tf.RaggedTensor: "its flat_values", tf.SparseTensor: "its values"}
        reason = (
            ", an object that holds tensors. Only tensors have gradients: pass "
            f"{parts.get(type(value), 'those that it holds')}, and make the object of them where "
            "it is used."
        )
    elif callable(value):
        reason = ". To give a function a gradient, use sgtrick.with_gradient or sgtrick.custom_vjp."
    return TypeError(
        f"{name} must be a tensor, variable, array or number, got {type(value).__name__}{reason}"
    )


def static_shape(tensor: Tensor) -> shapes.Shape | None:
    """The shape of a tensor as far as it is known while tracing."""
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def checked(fits: Tensor, tensor: Tensor, message: str, *others: Tensor | str) -> Tensor:
    """Returns `tensor`; if `fits` is false, a run-time error with its and the others' shapes.

    Words among the others are printed between the shapes.
    """
    shape = tf.shape(tensor)
    data = [t if isinstance(t, str) else tf.shape(t) for t in others]
    check = tf.debugging.Assert(fits, [message, shape, *data], summarize=16)
    with tf.control_dependencies([check]):
        # XLA drops assertions; there the impossible size is the error.
        impossible = tf.fill([tf.where(fits, 0, 1)], -2)
        checked = tf.reshape(tensor, tf.concat([shape, impossible], 0))
    checked.set_shape(tensor.shape)
    return checked


def shaped_like(tensor: Tensor, like: Tensor, name: str, like_name: str) -> Tensor:
    """Returns `tensor`, checked to have the shape of `like`: while tracing, if that is known.

    Raises:
        ValueError: The shapes cannot be equal.
    """
    shape, expected = static_shape(tensor), static_shape(like)
    shapes.check_equal(shape, expected, name, like_name)
    if shapes.is_known(shape, expected):
        return tensor
    fits = equal_shapes(tf.shape(tensor), tf.shape(like))
    return checked(fits, tensor, f"{name} has shape", "expected", like)


def equal_shapes(a: Tensor, b: Tensor) -> Tensor:
    """Whether two shape vectors, perhaps of different lengths, are equal."""
    n = tf.minimum(tf.size(a), tf.size(b))
    return tf.equal(tf.size(a), tf.size(b)) & tf.reduce_all(tf.equal(a[:n], b[:n]))


# Each call of tf.nest takes as long as an eager operation, or two.
def pack_as(structure: Structure, leaves: Sequence[Tensor]) -> Structure:
    """Leaves in a structure; at once if that is one tensor."""
    if isinstance(structure, tf.Tensor):
        return leaves[0]
    return tf.nest.pack_sequence_as(structure, leaves)


def pack_present(structure: Structure, leaves: Sequence[Tensor]) -> Structure:
    """Leaves in a structure, in the places of those that are not None."""
    if isinstance(structure, tf.Tensor):
        return leaves[0]
    return tf.nest.pack_sequence_as(structure, spread(leaves, tf.nest.flatten(structure)))


def map_leaves(f: Function, structure: Structure) -> Structure:
    """The results for each leaf, in the structure; at once if that is one tensor."""
    return f(structure) if isinstance(structure, tf.Tensor) else tf.nest.map_structure(f, structure)


def present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors that are not None."""
    return [t for t in tensors if t is not None]


def spread(tensors: Sequence[Tensor], like: Sequence[object]) -> list[Tensor | None]:
    """`tensors` at the positions where `like` is not None, and None at the others."""
    some = iter(tensors)
    spread = [None if place is None else next(some) for place in like]
    assert next(some, None) is None
    return spread


def handle_of(variable: object) -> Tensor | None:
    """The handle of a variable; None of anything else."""
    variable = getattr(variable, "_value", variable)
    try:
        return getattr(variable, "handle", None)
    except ValueError:  # a variable of many replicas, read outside of them
        return None
