"""The value form: a value `fx` and a gradient `gx` at `x`, computed anywhere."""

from __future__ import annotations  # signatures that show the names of types

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._arguments import devices, value_form
from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import known_jacobian
from sgtrick._core.formula import formula
from sgtrick._core.kept import with_derivatives
from sgtrick._core.known_jacobian import Blocks, ByVector
from sgtrick._core.rule import InAddition
from sgtrick._tensorflow.autograph import unconverted
from sgtrick._tensorflow.graphs import here
from sgtrick._tensorflow.tapes import is_pushed, not_recording
from sgtrick._types import Device, Structure, Tensor, TensorLike


@unconverted
def custom_gradient(
    fx: TensorLike,
    gx: Structure,
    x: Structure,
    fx_gx_manually_stopped: bool = False,
    name: str | None = None,
    *,
    batch_ndims: int | None = None,
    hx: Structure = None,
    device: Device = None,
) -> Tensor:
    """Embeds values and gradients that were computed elsewhere.

    The result is `fx`, and its Jacobian with respect to `x` is `gx`, under every transformation of
    TensorFlow::

        stop(fx) + <stop(gx), x - stop(x)>

    With batch shape `B`, range `R` and domain `D`, for each leaf of `x`::

        fx: B + R        x: B + D        gx: B + R + D

    If `gx` has the shape of `x`, it is the gradient of each batch member (`B` is the shape of
    `fx`); if its shape is that of `fx` followed by that of `x`, it is a full Jacobian (`B` is
    empty). If `fx` has both batch and range dimensions, pass the number of batch dimensions as
    `batch_ndims`. An `fx` of one entry, such as `[1]`, may also have the `gx` of a scalar: with the
    shape of `x`, or a single number, the partial derivative with respect to every entry of `x`.

    Four chains at once, with an engine that knows nothing about TensorFlow:

        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import sgtrick
        >>> def log_prob(x):  # x [chains, dimensions]
        ...     value, gradient = -0.5 * np.sum(x.numpy() ** 2, axis=-1), -x.numpy()
        ...     return sgtrick.custom_gradient(value, gradient, x)
        >>> x = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = log_prob(x)
        >>> y.numpy()
        array([ -2.5, -12.5, -30.5, -56.5], dtype=float32)
        >>> tape.gradient(y, x).numpy()
        array([[-1., -2.],
               [-3., -4.],
               [-5., -6.],
               [-7., -8.]], dtype=float32)

    Args:
        fx: The value at `x`: tensor, variable, array or number, floating or complex. It is stopped,
            so that nothing it was computed from gets a gradient, except through `x`.
        gx: The Jacobian at `x`, in the structure of `x`. None instead of a leaf: no gradient
            there. For a leaf in a list it may be a nested list of numbers. It may have another
            precision. Complex: the derivative in `df = gx dx`, so that the tape returns
            `u * conj(gx)` as for native code; for a real `fx` of a complex `x`, `df = Re(gx dx)`.
        x: The point: tensor, `tf.Variable`, Keras variable, array or number, or any structure of
            these. Leaves of int, bool or string dtype are allowed where `gx` is None.
        fx_gx_manually_stopped: Does not stop `fx`, `gx` and `hx`: other tensors that they depend on
            keep their gradients, and the caller has to stop `x` in them.
        name: Prefix of the ops, `custom_gradient` if None.
        batch_ndims: The number of batch dimensions, `len(B)`. None: inferred from the shapes.
        hx: The Hessian at `x`, for second derivatives: blocks in a structure of structures as
            `jax.hessian` returns it, each of shape `B + R + D_i + D_j`, None for a zero block; or a
            linear function `v -> H v` on the structure of `x`, which is called only when a second
            derivative is requested (if `fx` has a range, and hence several Hessians, or is complex
            although `x` is real, TensorFlow has to be able to differentiate the function). Of
            blocks, the symmetric part is used; a function has to be symmetric, which
            `check_gradient` with `order=2` checks. 0: the Hessian is zero, so the gradient is a
            constant. None: the Hessian is unknown, and a second derivative with respect to `x`, of
            the result or of anything computed from it, is an error or NaN. So is a third
            derivative, unless `hx` is 0.
        device: Where to place the ops: a name such as `"GPU:0"` or `"CPU"`, a `tf.DeviceSpec`, a
            list of these in order of preference, or None for the surrounding `tf.device` scope.

    Returns:
        A tensor with the dtype, shape and value of `fx`, even where `gx` and `x` are not finite.
        For an upstream gradient `u`, of the shape of `fx`, each leaf gets
        `sum_R u[b, r] gx[b, r, d]` in its own dtype: no mean over the batch and no leak between its
        members. Products and sums are taken in the widest of the dtypes of `fx`, `gx` and the leaf,
        at least in float32. It is 0 where `u` is 0, even if `gx` is not finite. At a point that is
        not finite, the gradient of a member is either this or zero.

    Raises:
        TypeError: A dtype has no derivatives, `gx` is complex although `fx` and `x` are real, or an
            argument is not numeric.
        ValueError: Structures or shapes do not fit together, or no `device` is present.
        LookupError: When an unknown derivative is taken: of second order without `hx`, or of third
            order with it. Inside a `tf.function` this is a `tf.errors.InvalidArgumentError` when
            the function runs; around it and in XLA, where nothing can raise, the derivative is NaN.
            In eager execution, a derivative by something that `x` was computed from is NaN with a
            warning that has the message.
        tf.errors.InvalidArgumentError: At run time, for dimensions that were unknown while tracing.

    The name and the trick are those of `tfp.math.custom_gradient`, and every call that works
    correctly there, with gradients that have the shapes of `x`, gives the same result here.
    """
    with devices.scope(device):
        fx, leaves = value_form.at_point(TENSORFLOW, fx, gx, x, batch_ndims)
        name = name or "custom_gradient"
        with tf.name_scope(name):
            stop = tf.identity if fx_gx_manually_stopped else tf.stop_gradient
            hessian = _hessian(name, hx, x, fx, leaves, stop)
            leaves = [leaf._replace(gx=stop(leaf.gx)) for leaf in leaves]
            return _differentiable(name, stop(fx), leaves, hessian, not fx_gx_manually_stopped)


def _hessian(
    name: str,
    hx: Structure,
    x: Structure,
    fx: Tensor,
    leaves: Sequence[Leaf],
    stop: Callable[[Tensor], Tensor],
) -> Blocks | ByVector | str | None:
    """The Hessian, None if it is zero, or the message of the error if it is unknown."""
    if hx is None:
        return _FIRST_ORDER.format(name)
    if callable(hx):
        return ByVector(name, fx, hx, x, leaves)
    return None if value_form.is_zero(hx) else Blocks(name, hx, x, fx, leaves, stop)


def _differentiable(
    name: str,
    fx: Tensor,
    leaves: Sequence[Leaf],
    hessian: Blocks | ByVector | str | None,
    stopped: bool,
) -> Tensor:
    """The derivative in two forms: as a pullback, which is faster, and as the formula.

    Eager execution honours pullbacks, so the formula is not computed there. A graph also keeps the
    formula, which can be stored, loaded and differentiated where the pullback is unknown; not with
    a function for the Hessian, which would run in each forward pass.
    """
    leaves = [leaf._replace(x=here(leaf.x)) for leaf in leaves]
    xs, if_lost = [leaf.x for leaf in leaves], None
    if xs and not (tf.executing_eagerly() or isinstance(hessian, ByVector)):
        times = hessian.times if isinstance(hessian, Blocks) else None
        order = None if hessian is None else 1 if times is None else 2
        # The formula is recorded: of an operation that copies it, tapes know only what it copies.
        # Not in forward mode, where TensorFlow cannot differentiate all of the formula twice.
        with not_recording() if is_pushed([fx, *xs]) else contextlib.nullcontext():
            if_lost = [formula(fx, leaves, times, order=order, stopped=stopped)]
    if xs and not stopped:
        # gx has derivatives of its own here, so hx belongs to a second gradient of zeros.
        fx = formula(fx, leaves, order=None, stopped=False)
        leaves = [leaf._replace(gx=tf.zeros_like(leaf.gx)) for leaf in leaves]

    rule = known_jacobian.of_jacobians(
        name, fx, lambda: known_jacobian.differentiable(name, leaves, hessian)
    )
    rule = InAddition(rule)
    return with_derivatives([fx], [fx, *xs], rule, if_lost=if_lost, in_graph=if_lost is None)[0]


_FIRST_ORDER = (
    "{0} was asked for a second derivative, but only its value and gradient are known. Pass the "
    "Hessian or a function for Hessian-vector products as hx=, or hx=0 to treat it as zero, as "
    "first-order approximations do."
)
