"""The value form: `fx` and `gx` are known at `x`, whatever computed them."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sgtrick import _devices, _dtypes, _leaves, _trick
from sgtrick._leaves import Leaf
from sgtrick._shapes import Names


def custom_gradient(
    fx: Any,
    gx: Any,
    x: Any,
    fx_gx_manually_stopped: bool = False,
    name: str | None = None,
    *,
    batch_ndims: int | None = None,
    hx: Any = None,
    device: Any = None,
) -> Any:
    """Embeds values and gradients that were computed elsewhere into TensorFlow.

    The result is `fx`, and its Jacobian by `x` is `gx`, under every transformation of TensorFlow::

        stop(fx) + <stop(gx), x - stop(x)>

    With batch shape `B`, range `R` and domain `D`, per leaf of `x`::

        fx: B + R        x: B + D        gx: B + R + D

    `gx` with the shape of `x` is read as the gradient of each batch member (`B` is the shape of
    `fx`), `gx` with the shapes of `fx` and `x` together as a full Jacobian (`B` is empty). Where
    `fx` has both batch and range dimensions, `batch_ndims` says how many are batch. A number as
    `gx` of a scalar `fx` is the same partial derivative for every entry of `x`.

    Four chains at once, with an engine that knows nothing of TensorFlow:

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
        fx: The value at `x`: tensor, variable, array or number, floating or complex. Whatever it
            was computed from is stopped, variables that are not in `x` included.
        gx: The Jacobian at `x`, in the structure of `x`. None in the place of a leaf: no gradient
            there. Cast to the dtype of its leaf. Complex: the derivative in `df = gx dx`, so that
            the tape returns `u * conj(gx)` as for native code; for a real `fx` of a complex `x`,
            `df = Re(gx dx)`.
        x: The point: tensor, `tf.Variable`, Keras variable, array or number, or any structure of
            these. Leaves of int, bool or string dtype are fine where `gx` is None.
        fx_gx_manually_stopped: Stops nothing but `x - stop(x)`: what else `fx`, `gx` and `hx`
            depend on keeps its gradients, and stopping `x` in them is left to the caller.
        name: Prefix of the ops, `custom_gradient` if None.
        batch_ndims: `len(B)`, where it is not to be inferred.
        hx: The Hessian at `x`, for second derivatives: blocks in a structure of structures as
            `jax.hessian` returns it, each of shape `B + R + D_i + D_j`, None for a zero block; or a
            callable `v -> H v` on the structure of `x`, linear and differentiable by TensorFlow.
            Only the symmetric part counts. None: the result is of first order by construction. Its
            second derivative by `x` is unconnected, and in that of a nonlinear function of it the
            part with the Hessian is missing.
        device: Where the ops of the trick are put: a name such as `"GPU:0"` or `"CPU"`, a
            `tf.DeviceSpec`, a list of these of which the first present is taken, or None for the
            surrounding `tf.device` scope.

    Returns:
        A tensor with the dtype, shape and value of `fx`, also where `gx` and `x` are not finite.
        For an upstream `u` (the shape of `fx`) each leaf gets `sum_R u[b, r] gx[b, r, d]` in its
        own dtype: no mean over the batch and no leak between its members. It is 0 where `u` is 0
        even if `gx` is not finite. The gradient of a member at a point that is not finite is this
        or zero, never NaN by its own doing.

    Raises:
        TypeError: A dtype without derivatives, a complex `gx` of real `fx` and `x`, or something
            that is no number.
        ValueError: Structures or shapes do not fit together, `hx` is not connected to its argument,
            or no `device` is present.
        tf.errors.InvalidArgumentError: At run time, for dimensions that were unknown while tracing.

    The name and the trick are those of `tfp.math.custom_gradient`; every call which that answers
    correctly is answered the same.
    """
    with _devices.scope(device):
        pairs = _leaves.pair(x, gx)
        fx = _value(fx, like=next((x for _, x, gx in pairs if gx is not None), None))
        leaves = [
            _leaves.make_leaf(path, x, gx, fx, batch_ndims, Names("fx", f"gx{path}", f"x{path}"))
            for path, x, gx in pairs
            if gx is not None
        ]
        with tf.name_scope(name or "custom_gradient"):
            if hx is None and not fx_gx_manually_stopped:
                xs = [leaf.x for leaf in leaves]
                return _trick.embed(tf.stop_gradient(fx), xs, lambda: leaves)
            stop = tf.identity if fx_gx_manually_stopped else tf.stop_gradient
            if hx is None:
                hessian_times = None
            elif callable(hx):
                hessian_times = _from_product(hx, x, leaves)
            else:
                hessian_times = _from_blocks(hx, x, fx, leaves, stop)
            return _trick.formula(fx, leaves, hessian_times, stop=stop)


def _value(fx: Any, like: Any) -> Any:
    """Converts `fx`; a bare Python float has no dtype of its own and takes the precision of x."""
    dtype = None
    if type(fx) is float and hasattr(like, "dtype"):
        dtype = tf.as_dtype(like.dtype).base_dtype
        dtype = dtype.real_dtype if _leaves.is_differentiable(dtype) else None
    fx = _leaves.to_tensor(fx, "fx", dtype=dtype)
    _dtypes.check_value(fx.dtype.name)
    return fx


def _from_blocks(
    hx: Any, x: Any, fx: Any, leaves: Sequence[Leaf], stop: Callable[[Any], Any]
) -> Callable[[list[Any]], list[Any]]:
    """Returns `z -> H z` of Hessian blocks: each is the Jacobian of one `gx` by another `x`."""
    blocks = _leaves.pair_hessian(hx, x, {leaf.path for leaf in leaves})
    _dtypes.check_hessian(fx.dtype.name, [leaf.x.dtype.name for leaf in leaves])
    rows = [
        [
            None
            if blocks[p.path + q.path] is None
            else _leaves.make_leaf(
                p.path + q.path,
                q.x,
                blocks[p.path + q.path],
                p.gx,
                q.batch_ndims,
                Names(f"gx{p.path}", f"hx{p.path}{q.path}", f"x{q.path}"),
            )
            for q in leaves
        ]
        for p in leaves
    ]

    def hessian_times(z: list[Any]) -> list[Any]:
        return [
            tf.add_n(
                [tf.zeros_like(leaf.gx)]
                + [
                    _trick.cast(_trick.inner(stop(block.gx), z_q, block.batch_ndims), leaf.gx.dtype)
                    for block, z_q in zip(row, z, strict=True)
                    if block is not None
                ]
            )
            for leaf, row in zip(leaves, rows, strict=True)
        ]

    return hessian_times


def _from_product(
    hx: Callable[[Any], Any], x: Any, leaves: Sequence[Leaf]
) -> Callable[[list[Any]], list[Any]]:
    """Returns `z -> H z` of the caller's Hessian-vector product, checked."""

    def hessian_times(z: list[Any]) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(z)
            v = [tf.identity(z_i) for z_i in z]
            by_path = {leaf.path: v_i for leaf, v_i in zip(leaves, v, strict=True)}
            paths = [path for path, _ in _leaves.flatten(x)]
            product = hx(tf.nest.pack_sequence_as(x, [by_path.get(path) for path in paths]))
            products = {path: hv for path, _, hv in _leaves.pair(x, product, gx_name="hx(v)")}
            hz = [_product(products[leaf.path], leaf) for leaf in leaves]
        # Where recording is suspended (tf.recompute_grad), not even v is connected.
        if _connected(tape, v, z) and not _connected(tape, hz, z):
            raise ValueError(_leaves.NOT_CONNECTED.format("TensorFlow"))
        return hz

    return hessian_times


def _connected(tape: Any, ys: list[Any], xs: list[Any]) -> bool:
    return any(g is not None for g in tape.gradient(ys, xs))


def _product(hv: Any, leaf: Leaf) -> Any:
    name = f"hx(v){leaf.path}"
    if hv is None:
        return tf.zeros_like(leaf.gx)
    hv = _leaves.to_dtype(hv, leaf.gx.dtype, name, f"x{leaf.path} is {leaf.x.dtype.name}")
    return _leaves.shaped_like(hv, leaf.gx, name, "expected")
