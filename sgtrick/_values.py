"""The value form: `fx` and `gx` are known at `x`, whatever computed them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sgtrick import _devices, _leaves, _shapes, _trick
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
    """DOC"""
    with _devices.scope(device):
        pairs = _leaves.pair(x, gx)
        fx = _value(fx, like=next((x for _, x, gx in pairs if gx is not None), None))
        leaves = [
            _leaves.make_leaf(path, x, gx, fx, batch_ndims, Names("fx", f"gx{path}", f"x{path}"))
            for path, x, gx in pairs
            if gx is not None
        ]
        if tf.executing_eagerly() and hx is None and not fx_gx_manually_stopped:
            return _trick.identity_with_pullback(fx, leaves, partial(_devices.scope, device))
        with tf.name_scope(name or "custom_gradient"):
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
    if not _leaves.is_differentiable(fx.dtype):
        raise TypeError(
            f"fx has dtype {fx.dtype.name}, which has no derivatives. Cast it to a floating dtype."
        )
    return fx


def _from_blocks(
    hx: Any, x: Any, fx: Any, leaves: Sequence[Leaf], stop: Callable[[Any], Any]
) -> Callable[[list[Any]], list[Any]]:
    """Returns `z -> H z` of Hessian blocks: each is the Jacobian of one `gx` by another `x`."""
    paths = [path for path, _ in _leaves.flatten(x)]
    blocks = dict(_leaves.flatten(hx))
    expected = [p + q for p in paths for q in paths]
    if list(blocks) != expected:
        raise ValueError(
            "hx must hold a structure like x for each leaf of x, as jax.hessian returns it.\n"
            f"  expected: {', '.join('hx' + path for path in expected)}\n"
            f"  got:      {', '.join('hx' + path for path in blocks) or 'none'}"
        )
    differentiated = {leaf.path for leaf in leaves}
    for p in paths:
        for q in paths:
            if blocks[p + q] is None:
                if blocks[q + p] is not None:
                    raise ValueError(
                        f"hx{p}{q} is None but its transpose hx{q}{p} is not. Pass both, or None "
                        "for both where they are zero."
                    )
            elif not {p, q} <= differentiated:
                raise ValueError(
                    f"hx{p}{q} is given, but gx{p if p not in differentiated else q} is None: "
                    "what has no first derivative has no second. Pass None there."
                )
    if not fx.dtype.is_complex and any(leaf.x.dtype.is_complex for leaf in leaves):
        raise TypeError(
            f"hx: the second derivative of a real fx ({fx.dtype.name}) by a complex x is not one "
            "matrix. Give the real and imaginary parts of x as two leaves."
        )
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
            raise ValueError(
                "hx(v) is not connected to v, so the second derivative would be lost. TensorFlow "
                "must be able to differentiate it. Where it calls code outside TensorFlow, give it "
                "its own gradient: H is symmetric, so that the gradient of v -> H v is u -> H u."
            )
        return hz

    return hessian_times


def _connected(tape: Any, ys: list[Any], xs: list[Any]) -> bool:
    return any(g is not None for g in tape.gradient(ys, xs))


def _product(hv: Any, leaf: Leaf) -> Any:
    name = f"hx(v){leaf.path}"
    if hv is None:
        return tf.zeros_like(leaf.gx)
    hv = _leaves.to_dtype(hv, leaf.gx.dtype, name, f"x{leaf.path} is {leaf.x.dtype.name}")
    shape, expected = _leaves.static_shape(hv), _leaves.static_shape(leaf.gx)
    if shape is not None and expected is not None and not _shapes.compatible(shape, expected):
        raise ValueError(
            f"{name} has shape {_shapes.show(shape)}, expected {_shapes.show(expected)}, that of "
            f"gx{leaf.path}."
        )
    if not _shapes.is_known(shape, expected):
        fits = _leaves.equal_shapes(tf.shape(hv), tf.shape(leaf.gx))
        hv = _leaves.insist(fits, hv, f"{name} must have the shape of gx{leaf.path}:", leaf.gx)
    return hv
