"""Hessians as callers give them: blocks, or a function for the product with a vector.

As the derivative of the gradients, a Hessian is known at one point: its own derivative is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick import _dtypes, _leaves
from sgtrick._core import adjoint, embedding, formula, loud
from sgtrick._core._tensorflow import here
from sgtrick._core.override import Rule, keep
from sgtrick._leaves import Leaf
from sgtrick._shapes import Names

_THIRD = (
    "A third derivative of {0} was asked for, which was given a value, a gradient and a Hessian. "
    "Give the function itself derivatives of every order, by sgtrick.with_gradient or "
    "sgtrick.custom_jvp."
)


def symmetric(
    name: str,
    times: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    at: Sequence[Any],
    xs: Sequence[Any],
) -> "Symmetric":
    """A Hessian by a function for its product with a vector, which nothing differentiates.

    Args:
        name: What errors call the function.
        times: From `at` and one tensor like each of `xs` to as many.
        at: What the function takes to know the point.
        xs: The points.
    """

    def product(at: Sequence[Any], xs: Sequence[Any], vs: Sequence[Any]) -> list[Any]:
        at, xs = [here(t) for t in at], [here(x) for x in xs]

        def pull(*z: Any) -> list[Any]:
            return [*product(at, xs, z), *(loud.failure(x, _THIRD.format(name), z) for x in xs)]

        def push(*tangents: Any) -> list[Any]:
            zero = loud.insist_on_zeros(tangents[len(xs) :], _THIRD.format(name))
            pushed = product(at, xs, tangents[: len(xs)])
            return [t + tf.cast(zero, t.dtype) for t in pushed]

        inputs = [*vs, *xs]
        return keep(times(at, vs), inputs, Rule(name, pull, push, lost=[False] * len(inputs)))

    def at_the_point(*vs: Any) -> list[Any]:
        return product(at, xs, vs)

    return Symmetric(at_the_point, at_the_point)


class Symmetric(NamedTuple):
    """The same function for both modes."""

    pull: Callable[..., Sequence[Any]]
    push: Callable[..., Sequence[Any]]


class Blocks:
    """Blocks `H_ij`, `B + R + D_i + D_j`: the Jacobian of one `gx` with respect to another `x`.

    Only the symmetric part counts, as in `1/2 <H z, z>`.
    """

    def __init__(
        self,
        name: str,
        hx: Any,
        x: Any,
        fx: Any,
        leaves: Sequence[Leaf],
        stop: Callable[[Any], Any],
    ) -> None:
        blocks = _leaves.pair_hessian(hx, x, {leaf.path for leaf in leaves})
        _dtypes.check_hessian(fx.dtype.name, [leaf.x.dtype.name for leaf in leaves])
        self._name, self._leaves = name, leaves
        self._rows = [
            [
                None
                if blocks[p.path + q.path] is None
                else _leaves.make_leaf(
                    p.path + q.path,
                    q.x,
                    stop(blocks[p.path + q.path]),
                    p.gx,
                    q.batch_ndims,
                    Names(f"gx{p.path}", f"hx{p.path}{q.path}", f"x{q.path}"),
                )
                for q in leaves
            ]
            for p in leaves
        ]

    def times(self, z: Sequence[Any]) -> list[Any]:
        """Returns `H z`, each of the shape and dtype of its `gx`."""
        return [
            tf.add_n([tf.zeros_like(leaf.gx), *_inner(row, z, leaf.gx.dtype)])
            for leaf, row in zip(self._leaves, self._rows, strict=True)
        ]

    def pull(self, *z: Any) -> list[Any]:
        """From what multiplies the gradients to what it makes of the points."""
        rows = self._symmetric()
        pulled = []
        for j, q in enumerate(self._leaves):
            terms = [
                formula.transpose(row[j], z_i)
                for row, z_i in zip(rows, z, strict=True)
                if row[j] is not None
            ]
            pulled.append(tf.add_n([tf.zeros_like(q.x), *terms]))
        return pulled

    def push(self, *tangents: Any) -> list[Any]:
        """From tangents of the points to tangents of the gradients."""
        return [
            tf.add_n([tf.zeros_like(leaf.gx), *_inner(row, tangents, leaf.gx.dtype)])
            for leaf, row in zip(self._leaves, self._symmetric(), strict=True)
        ]

    def _symmetric(self) -> list[list[Any]]:
        rows = [
            [
                other and block and block._replace(gx=(block.gx + _swapped(other, p, q)) / 2)
                for q, block, other in zip(
                    self._leaves, row, (r[i] for r in self._rows), strict=True
                )
            ]
            for i, (p, row) in enumerate(zip(self._leaves, self._rows, strict=True))
        ]
        blocks = [block for row in rows for block in row if block is not None]
        known = iter(
            embedding.refused(
                self._name,
                [block.gx for block in blocks],
                [leaf.x for leaf in self._leaves],
                _THIRD.format(self._name),
            )
        )
        return [[block and block._replace(gx=next(known)) for block in row] for row in rows]


def _inner(row: Sequence[Any], z: Sequence[Any], dtype: Any) -> list[Any]:
    return [
        formula.cast(formula.inner(block.gx, z_j, block.batch_ndims), dtype)
        for block, z_j in zip(row, z, strict=True)
        if block is not None
    ]


def _swapped(block: Leaf, p: Leaf, q: Leaf) -> Any:
    """`H_ji`, `B + R + D_j + D_i`, as `B + R + D_i + D_j`."""
    rank = tf.rank(block.gx)
    i, j = tf.rank(p.x) - p.batch_ndims, tf.rank(q.x) - q.batch_ndims
    front = tf.range(rank - i - j)
    perm = tf.concat([front, tf.range(rank - i, rank), tf.range(rank - i - j, rank - i)], 0)
    return tf.cast(tf.transpose(block.gx, perm), block.gx.dtype)


class Product:
    """A function `v -> H v` on the structure of `x`, called for second derivatives alone."""

    def __init__(
        self, name: str, hx: Callable[[Any], Any], x: Any, fx: Any, leaves: Sequence[Leaf]
    ) -> None:
        self._name, self._hx, self._x, self._fx, self._leaves = name, hx, x, fx, leaves

    def times(self, z: Sequence[Any]) -> list[Any]:
        """Returns `H z`, each of the shape and dtype of its `gx`."""
        by_path = {leaf.path: z_i for leaf, z_i in zip(self._leaves, z, strict=True)}
        paths = [path for path, _ in _leaves.flatten(self._x)]
        product = self._hx(tf.nest.pack_sequence_as(self._x, [by_path.get(p) for p in paths]))
        products = {path: hv for path, _, hv in _leaves.pair(self._x, product, gx_name="hx(v)")}
        return [_like_gradient(products[leaf.path], leaf) for leaf in self._leaves]

    def push(self, *tangents: Any) -> list[Any]:
        """From tangents of the points to tangents of the gradients."""
        ts = [tf.cast(t, leaf.x.dtype) for t, leaf in zip(tangents, self._leaves, strict=True)]
        return embedding.refused(
            self._name,
            self.times(ts),
            [leaf.x for leaf in self._leaves],
            _THIRD.format(self._name),
        )

    def pull(self, *z: Any) -> list[Any]:
        """From what multiplies the gradients to what it makes of the points: `H` is symmetric."""
        if self._fx.shape.rank == self._leaves[0].batch_ndims:
            conj = [tf.math.conj(z_i) if z_i.dtype.is_complex else z_i for z_i in z]
            return [
                formula.cast(tf.math.conj(hz) if hz.dtype.is_complex else hz, leaf.x.dtype)
                for hz, leaf in zip(self.push(*conj), self._leaves, strict=True)
            ]
        # A Hessian for each entry of the range: what multiplies them is summed over.
        v = [adjoint.probe(leaf.x) for leaf in self._leaves]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(v)
            products = self.push(*v)
        found = tape.gradient(products, v, output_gradients=list(z))
        fits = adjoint.holds(z, products, found, v)
        zero = loud.insist(fits, _leaves.NOT_CONNECTED.format("TensorFlow"))
        return [
            tf.zeros_like(v_i) if g is None else g + tf.cast(zero, g.dtype)
            for g, v_i in zip(found, v, strict=True)
        ]


def _like_gradient(hv: Any, leaf: Leaf) -> Any:
    name = f"hx(v){leaf.path}"
    if hv is None:
        return tf.zeros_like(leaf.gx)
    hv = _leaves.to_dtype(hv, leaf.gx.dtype, name, f"x{leaf.path} is {leaf.x.dtype.name}")
    return _leaves.shaped_like(hv, leaf.gx, name, "expected")
