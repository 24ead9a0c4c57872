"""The value form on every backend: `fx` and `gx` are known at `x`, whatever computed them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

import sgtrick
from sgtrick import _dtypes, _leaves, _shapes
from sgtrick._leaves import Leaf
from sgtrick._shapes import Names
from sgtrick.keras import _backends, _structures, _symbolic, _trick


def custom_gradient(
    fx: Any,
    gx: Any,
    x: Any,
    fx_gx_manually_stopped: bool = False,
    name: str | None = None,
    *,
    batch_ndims: int | None = None,
    hx: Any = None,
) -> Any:
    """Embeds values and gradients that were computed elsewhere, on any backend of Keras.

    `sgtrick.custom_gradient`, with the same rules for shapes, structures, values that are not
    finite, dtypes and second derivatives. On the tensorflow backend it is that function. On jax and
    torch it is an override of the derivative, which these keep when they differentiate, map and
    compile.

    Two members of a batch, each with its own upstream gradient:

        >>> import numpy as np
        >>> from keras import ops
        >>> import sgtrick.keras
        >>> def log_prob(x):  # x [members, dimensions]
        ...     value, gradient = -0.5 * ops.sum(x**2, -1), -x
        ...     return sgtrick.keras.custom_gradient(value, gradient, x)
        >>> x = ops.convert_to_tensor([[1.0, 2.0], [3.0, 4.0]], "float32")
        >>> ops.convert_to_numpy(log_prob(x))
        array([ -2.5, -12.5], dtype=float32)

    Any of `fx`, `gx`, `x` and the blocks of `hx` may be a `KerasTensor` of the functional API.

    Args:
        fx: The value at `x`, shape `B + R`: tensor, variable, array or number, floating or complex.
            Whatever it was computed from is stopped.
        gx: The Jacobian at `x`, in the structure of `x`, leaves of shape `B + R + D`. None in the
            place of a leaf: no gradient there.
        x: The point, leaves of shape `B + D`.
        fx_gx_manually_stopped: Stops neither `fx` nor `gx`, whose own derivatives are added.
        name: Prefix of TensorFlow's ops, and name of the operation in functional models.
        batch_ndims: `len(B)`, where it is not to be inferred.
        hx: The Hessian at `x`: blocks in a structure of structures, each `B + R + D_i + D_j`, None
            for a zero block; or a callable `v -> H v`, linear and differentiable by the backend,
            computed only for a second derivative (on torch, inside transformations of `torch.func`,
            in each forward pass); or 0: the gradient is a constant.

    Returns:
        A tensor with the dtype, shape and value of `fx`; a `KerasTensor` if an argument is one.

    Raises:
        TypeError: A dtype without derivatives, a complex `gx` of real `fx` and `x`, or something
            that is no number.
        ValueError: Structures or shapes do not fit together, or `hx` is not connected to its
            argument.
        LookupError: A second derivative without `hx`, or a third with it; on tensorflow as in
            `sgtrick.custom_gradient`.
        NotImplementedError: The backend has no derivatives; or, on torch, where it loses custom
            ones: forward mode over forward mode, and `torch.func` inside `torch.compile`.
    """
    if _symbolic.any_symbolic((fx, gx, x, None if callable(hx) else hx)):
        product = hx if callable(hx) else None
        operation = CustomGradient(fx_gx_manually_stopped, batch_ndims, product, name=name)
        return operation(fx, gx, x, None if callable(hx) else hx)
    if _backends.is_tensorflow():
        options = {"batch_ndims": batch_ndims, "hx": hx}
        return sgtrick.custom_gradient(fx, gx, x, fx_gx_manually_stopped, name, **options)
    pairs = _leaves.pair(x, gx)
    fx = _value(fx, like=next((x for _, x, gx in pairs if gx is not None), None))
    leaves = [
        _make_leaf(path, x, gx, fx, batch_ndims, Names("fx", f"gx{path}", f"x{path}"))
        for path, x, gx in pairs
        if gx is not None
    ]
    if hx is None:
        product = None
    elif callable(hx):
        product = _from_product(hx, x, leaves)
    else:
        product = _from_blocks(hx, x, fx, leaves)
    embed = _trick.unstopped if fx_gx_manually_stopped else _trick.embed
    return embed(fx, leaves, product)


@keras.saving.register_keras_serializable(package="sgtrick")
class CustomGradient(keras.Operation):  # type: ignore[misc]
    """`custom_gradient` in a functional model."""

    def __init__(
        self,
        fx_gx_manually_stopped: bool,
        batch_ndims: int | None,
        product: Callable[[Any], Any] | None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._stopped, self._batch_ndims, self._product = (
            fx_gx_manually_stopped,
            batch_ndims,
            product,
        )

    def call(self, fx: Any, gx: Any, x: Any, hx: Any) -> Any:
        hx = hx if self._product is None else self._product
        options = {"batch_ndims": self._batch_ndims, "hx": hx}
        return custom_gradient(fx, gx, x, self._stopped, **options)

    def compute_output_spec(self, fx: Any, gx: Any, x: Any, hx: Any) -> Any:
        del hx  # its blocks are checked at the call
        pairs = [pair for pair in _leaves.pair(x, gx) if pair[2] is not None]
        fx = _symbolic.spec(fx, "fx")
        _dtypes.check_value(fx.dtype)
        for path, x, gx in pairs:
            names = Names("fx", f"gx{path}", f"x{path}")
            x, gx = _symbolic.spec(x, names.x), _symbolic.spec(gx, names.gx)
            _check_cast(gx.dtype, _dtypes.of_jacobian(fx.dtype, x.dtype, names), fx, x, names)
            _shapes.infer_batch_ndims(fx.shape, gx.shape, x.shape, self._batch_ndims, names)
        return keras.KerasTensor(fx.shape, fx.dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fx_gx_manually_stopped": self._stopped,
            "batch_ndims": self._batch_ndims,
            "product": keras.saving.serialize_keras_object(self._product),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CustomGradient":
        product = keras.saving.deserialize_keras_object(config["product"])
        return cls(**{**config, "product": product})


def _value(fx: Any, like: Any) -> Any:
    """Converts `fx`; a bare Python float has no dtype of its own and takes the precision of x."""
    dtype = None
    if type(fx) is float and hasattr(like, "dtype"):
        dtype = _trick.dtype_of(like)
        dtype = {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)
        dtype = dtype if _dtypes.is_differentiable(dtype) else None
    fx = _symbolic.to_tensor(fx, "fx", dtype)
    _dtypes.check_value(_trick.dtype_of(fx))
    return fx


def _make_leaf(path: str, x: Any, gx: Any, fx: Any, batch_ndims: int | None, names: Names) -> Leaf:
    """`_leaves.make_leaf` for tensors of these backends, whose shapes are always known."""
    x = _symbolic.to_tensor(x, names.x)
    dtype = _dtypes.of_jacobian(_trick.dtype_of(fx), _trick.dtype_of(x), names)
    gx = _to_dtype(gx, dtype, fx, x, names)
    shapes = tuple(fx.shape), tuple(gx.shape), tuple(x.shape)
    batch_ndims = _shapes.infer_batch_ndims(*shapes, batch_ndims, names)
    if len(gx.shape) < len(x.shape):
        gx = ops.broadcast_to(gx, x.shape)  # rank 0: the same partial for every entry
    return Leaf(path, x, gx, batch_ndims)


def _to_dtype(gx: Any, dtype: str, fx: Any, x: Any, names: Names) -> Any:
    # A bare Python number would lose digits by way of float32.
    gx = _symbolic.to_tensor(gx, names.gx, dtype if type(gx) in (int, float) else None)
    _check_cast(_trick.dtype_of(gx), dtype, fx, x, names)
    return ops.cast(gx, dtype)


def _check_cast(came: str, dtype: str, fx: Any, x: Any, names: Names) -> None:
    fx, x = _trick.dtype_of(fx), _trick.dtype_of(x)
    _dtypes.check_cast(came, dtype, names.gx, f"{names.fx} is {fx}, {names.x} {x}")


def _from_blocks(hx: Any, x: Any, fx: Any, leaves: Sequence[Leaf]) -> _trick.Product:
    """Returns `z -> H z` of Hessian blocks: each is the Jacobian of one `gx` by another `x`."""
    if _is_zero(hx):
        rows: list[list[Any]] = [[None for _ in leaves] for _ in leaves]
    else:
        blocks = _leaves.pair_hessian(hx, x, {leaf.path for leaf in leaves})
        rows = [[blocks[p.path + q.path] for q in leaves] for p in leaves]
    _dtypes.check_hessian(_trick.dtype_of(fx), [_trick.dtype_of(leaf.x) for leaf in leaves])
    rows = [
        [
            block
            if block is None
            else _make_leaf(
                p.path + q.path,
                q.x,
                block,
                p.gx,
                q.batch_ndims,
                Names(f"gx{p.path}", f"hx{p.path}{q.path}", f"x{q.path}"),
            )
            for q, block in zip(leaves, row, strict=True)
        ]
        for p, row in zip(leaves, rows, strict=True)
    ]

    def hessian_times(z: list[Any]) -> list[Any]:
        products = [_connected_zero(leaf.gx, z) for leaf in leaves]
        for i, row in enumerate(rows):
            for block, z_q in zip(row, z, strict=True):
                if block is not None:
                    term = _trick.inner(ops.stop_gradient(block.gx), z_q, block.batch_ndims)
                    products[i] = products[i] + _trick.cast(term, _trick.dtype_of(products[i]))
        return products

    return hessian_times


def _is_zero(hx: Any) -> bool:
    """Whether that is said of the whole Hessian."""
    return type(hx) in (int, float) and hx == 0


def _connected_zero(like: Any, z: list[Any]) -> Any:
    """Zero, of which torch knows that it depends on `z`: no derivative is not one that is zero."""
    total = sum(ops.sum(_trick.cast(z_i, "float32")) for z_i in z)
    return ops.zeros_like(like) + ops.cast(0 * total, _trick.dtype_of(like))


def _from_product(hx: Callable[[Any], Any], x: Any, leaves: Sequence[Leaf]) -> _trick.Product:
    """Returns `z -> H z` of the caller's Hessian-vector product, checked."""

    def hessian_times(z: list[Any]) -> list[Any]:
        by_path = {leaf.path: z_i for leaf, z_i in zip(leaves, z, strict=True)}
        v = [by_path.get(path) for path, _ in _leaves.flatten(x)]
        product = hx(_structures.pack(x, v))
        products = {path: hv for path, _, hv in _leaves.pair(x, product, gx_name="hx(v)")}
        return [_product(products[leaf.path], leaf) for leaf in leaves]

    def insisting(z: list[Any]) -> list[Any]:
        if not _backends.native().depends(hessian_times, z):
            raise ValueError(_leaves.NOT_CONNECTED.format(keras.backend.backend()))
        return hessian_times(z)

    return insisting if leaves else hessian_times


def _product(hv: Any, leaf: Leaf) -> Any:
    if hv is None:
        return ops.zeros_like(leaf.gx)
    names = Names(f"x{leaf.path}", f"hx(v){leaf.path}", f"x{leaf.path}")
    hv = _symbolic.to_tensor(hv, names.gx)
    came, dtype = _trick.dtype_of(hv), _trick.dtype_of(leaf.gx)
    _dtypes.check_cast(came, dtype, names.gx, f"x{leaf.path} is {_trick.dtype_of(leaf.x)}")
    _shapes.check_equal(tuple(hv.shape), tuple(leaf.gx.shape), names.gx, "expected")
    return ops.cast(hv, dtype)
