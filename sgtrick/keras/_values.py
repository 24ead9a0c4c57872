"""The value form on every backend: `fx` and `gx` at `x`, whatever computed them."""

from __future__ import annotations  # signatures that show the names of types

from collections.abc import Sequence

import keras
from keras import ops

import sgtrick
from sgtrick._arguments import value_form
from sgtrick._arguments.structures import Leaf
from sgtrick._types import Function, Structure
from sgtrick.keras import _backends
from sgtrick.keras._symbolic import Call, any_symbolic
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._types import Gradients, Product, Pullback, Tensor, TensorLike, Tensors


@keras.saving.register_keras_serializable(package="sgtrick")  # type: ignore[untyped-decorator]
def custom_gradient(
    fx: TensorLike,
    gx: Structure,
    x: Structure,
    fx_gx_manually_stopped: bool = False,
    name: str | None = None,
    *,
    batch_ndims: int | None = None,
    hx: Structure = None,
) -> Tensor:
    """Embeds values and gradients that were computed elsewhere, on any Keras backend.

    Like `sgtrick.custom_gradient`, with the same rules for shapes, structures, dtypes, values that
    are not finite, and second derivatives. On the tensorflow backend it is that function. On jax
    and torch it overrides the derivative, which these frameworks keep when they differentiate, map
    and compile.

    A batch of two:

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
        fx: The value at `x`, shape `B + R`: a tensor, variable, array or number, floating or
            complex. Its own derivatives are stopped.
        gx: The Jacobian at `x`, in the structure of `x`, with leaves of shape `B + R + D`, or of
            that of `x` if `fx` has one entry. None for a leaf means that this leaf gets no
            gradient. A leaf in a list may be a nested list of numbers.
        x: The point, with leaves of shape `B + D`.
        fx_gx_manually_stopped: If True, `fx` and `gx` are not stopped, and their own derivatives
            are added.
        name: Prefix of op names on tensorflow, and name of the operation in functional models.
        batch_ndims: `len(B)`, if it should not be inferred.
        hx: The Hessian at `x`, one of: blocks in a structure of structures, each `B + R + D_i +
            D_j`, or None for a zero block, of which the symmetric part is used; a callable
            `v -> H v`, linear, symmetric and differentiable by the backend, which is evaluated only
            for a second derivative (on torch, inside `torch.func` transformations, also in each
            forward pass); or 0, which states that the gradient is a constant.

    Returns:
        A tensor with the dtype, shape and value of `fx`; a `KerasTensor` if an argument is one.

    Raises:
        TypeError: A dtype has no derivatives, `gx` is complex although `fx` and `x` are real, an
            argument is not numeric, or `hx` closes over a `KerasTensor`.
        ValueError: Structures or shapes do not fit together, or `hx` is not connected to its
            argument.
        LookupError: A second derivative without `hx`, or a third one with it; on tensorflow as in
            `sgtrick.custom_gradient`.
        NotImplementedError: The backend has no derivatives; or, on torch, a transformation that
            loses custom derivatives: forward mode over forward mode, and `torch.func` inside
            `torch.compile`.
    """
    options = {"batch_ndims": batch_ndims, "hx": hx}
    if any_symbolic((fx, gx, x, hx)):
        if callable(hx):
            _check_not_symbolic(hx, x)
        operation = Call(custom_gradient, name=name)
        return operation.symbolic_call((fx, gx, x, fx_gx_manually_stopped), options)
    if _backends.is_tensorflow():
        return sgtrick.custom_gradient(fx, gx, x, fx_gx_manually_stopped, name, **options)
    fx, leaves = value_form.at_point(KERAS, fx, gx, x, batch_ndims)
    product = _product(hx, x, fx, leaves)
    if fx_gx_manually_stopped:
        return _unstopped(fx, leaves, product)
    return _with_rule(ops.stop_gradient(fx), leaves, product)


def _check_not_symbolic(hx: Function, x: Structure) -> None:
    """Raises if `hx` returns a symbolic tensor for one that is not."""

    def checked(v: Structure) -> Structure:
        if any_symbolic(hx(v)):
            raise TypeError(_SYMBOLIC)
        return []

    Call(checked).compute_output_spec((x,), {})


def _with_rule(fx: Tensor, leaves: Sequence[Leaf], product: Product | None) -> Tensor:
    """Adds the Jacobians of the leaves to `fx`, and `product` as their derivative."""
    if not leaves:
        return fx
    (h,) = _backends.native().with_vjp(ValueRule(fx, leaves, product))
    return h


class ValueRule:
    """A value with known Jacobians, and perhaps a Hessian, beside its own derivative: a `Rule`.

    Its inputs are the value, constants of the Hessian, the Jacobians and the points.
    """

    not_argument = not_connected = None

    def __init__(self, fx: Tensor, leaves: Sequence[Leaf], product: Product | None) -> None:
        gs, xs = [ops.stop_gradient(leaf.gx) for leaf in leaves], [leaf.x for leaf in leaves]
        constants: Tensors = []
        self._leaves, self._derived = leaves, _without_hessian
        if product is not None:
            native = _backends.native()
            gs, constants, self._derived = native.prepared(gs, xs, product, _NO_THIRD)
        self.inputs = [fx, *constants, *gs, *xs]

    def __call__(self, *inputs: Tensor) -> tuple[list[Tensor], Pullback]:
        def pull(u: Tensor) -> Gradients:
            gradients = [KERAS.transpose(leaf, u) for leaf in self._at(inputs)]
            return [u, *[None] * (len(inputs) - 1 - len(gradients)), *gradients]

        return [inputs[0]], pull

    def push(self, inputs: Tensors, tangents: Tensors) -> list[Tensor]:
        """Returns the tangent of the value."""
        dtype, of_xs = KERAS.dtype_of(inputs[0]), tangents[-len(self._leaves) :]
        return [KERAS.add([tangents[0], *KERAS.linear(self._at(inputs), of_xs, dtype)])]

    def _at(self, inputs: Tensors) -> list[Leaf]:
        """The leaves at these inputs, with Jacobians that have a derivative."""
        n = len(self._leaves)
        constants, gs, xs = inputs[1 : -2 * n], inputs[-2 * n : -n], inputs[-n:]
        at = zip(self._leaves, self._derived(constants, gs, xs), xs, strict=True)
        return [leaf._replace(gx=g, x=x) for leaf, g, x in at]


def _without_hessian(_: Tensors, gs: Tensors, xs: Tensors) -> Tensors:
    return _backends.native().refused(gs, xs, _NO_SECOND)  # type: ignore[no-any-return]


def _product(hx: Structure, x: Structure, fx: Tensor, leaves: Sequence[Leaf]) -> Product | None:
    """Returns `z -> H z`, which the backend can differentiate."""
    if hx is None:
        return None
    if value_form.is_zero(hx):
        return lambda _: [ops.zeros_like(leaf.gx) for leaf in leaves]
    if not callable(hx):
        blocks = value_form.Blocks(KERAS, hx, x, fx, leaves, ops.stop_gradient)
        return lambda z: blocks.times(z, blocks.symmetric())
    product = value_form.ByVector(KERAS, hx, x, leaves)

    def times(z: Tensors) -> list[Tensor]:
        if not _backends.native().depends(product.times, z):
            raise ValueError(product.not_connected)
        return product.times(z)

    return times


def _unstopped(fx: Tensor, leaves: Sequence[Leaf], product: Product | None) -> Tensor:
    """Returns `fx + sum_i <gx_i, x_i - stop(x_i)>`, where `fx` and `gx` keep their derivatives."""
    zeros = [_backends.native().zero(leaf.x) for leaf in leaves]
    fx = KERAS.add([fx, *KERAS.linear(leaves, zeros, KERAS.dtype_of(fx))])
    if product is None:
        return fx
    # gx has derivatives of its own here, so product belongs to a second gradient of zeros.
    return _with_rule(fx, [leaf._replace(gx=ops.zeros_like(leaf.gx)) for leaf in leaves], product)


_SYMBOLIC = (
    "hx closes over a symbolic tensor, which has no value when hx is called. Pass the Hessian "
    "itself as hx=, or call sgtrick.keras.custom_gradient in the `call` of a layer."
)
_NO_SECOND = (
    "sgtrick.keras.custom_gradient was asked for a second derivative, but was given only a value "
    "and a gradient. Pass the Hessian or a function for Hessian-vector products as hx=, or hx=0 if "
    "the Hessian is zero; None in place of a block means that this block is zero."
)
_NO_THIRD = (
    "sgtrick.keras.custom_gradient was asked for a third derivative, but was given only a value, a "
    "gradient and a Hessian. Apply keras.ops.stop_gradient to what need not be differentiated "
    "again."
)
