"""Linear maps and checked arguments of the value form, for all tensor libraries."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from sgtrick._arguments import dtypes, shapes, structures
from sgtrick._arguments.structures import Leaf
from sgtrick._types import Ndims, Structure, Tensor, TensorLike


@dataclasses.dataclass(frozen=True)
class Backend:
    """The operations that a tensor library supplies, and what the value form builds from them.

    dtypes are given by name. Ranks and numbers of dimensions are ints, or tensors if they are
    unknown while tracing.
    """

    name: str
    # (value, name, *, dtype=None): errors name the argument
    to_tensor: Callable[..., Tensor]
    dtype_of: Callable[[Tensor], str]
    # as far as it is known
    shape_of: Callable[[Tensor], shapes.Shape | None]
    rank: Callable[[Tensor], Ndims]
    as_dtype: Callable[[Tensor, str], Tensor]
    real: Callable[[Tensor], Tensor]
    conj: Callable[[Tensor], Tensor]
    zeros_like: Callable[[Tensor], Tensor]
    # of several tensors
    add: Callable[[Sequence[Tensor]], Tensor]
    # (c, z), like c: zero where z is zero, even if c is not finite
    times: Callable[[Tensor, Tensor], Tensor]
    broadcast_to: Callable[[Tensor, Any], Tensor]
    # (t, axis, count): dimensions of size 1 before axis
    insert_ones: Callable[[Tensor, Ndims, Ndims], Tensor]
    # (t, i, j): swaps the last j dimensions with the i before them
    swap: Callable[[Tensor, Ndims, Ndims], Tensor]
    # (t, first, last): over the dimensions range(first, last)
    sum: Callable[[Tensor, Ndims, Ndims], Tensor]
    # (structure, leaves)
    pack: Callable[[Structure, Sequence[Tensor | None]], Structure]
    # (fx, gx, x, batch_ndims, names): returns gx and batch_ndims
    check_at_run_time: Callable[..., tuple[Tensor, Ndims]]
    # (t, like, name, like_name): t, checked to have the shape of like
    shaped_like: Callable[..., Tensor]

    def cast(self, t: Tensor, dtype: str) -> Tensor:
        """Casts, taking the real part of complex numbers if `dtype` is real."""
        came = self.dtype_of(t)
        if came == dtype:
            return t
        if dtypes.is_complex(came) and not dtypes.is_complex(dtype):
            t = self.real(t)
        return self.as_dtype(t, dtype)

    def inner(self, c: Tensor, z: Tensor, batch_ndims: Ndims) -> Tensor:
        """Returns `<c, z>` over the domain of `z`, its dimensions after the batch.

        Shapes `B + E + D` and `B + D` give `B + E`. Where `z` is zero, so is the product, and where
        the upstream gradient is zero, so is the gradient, even if `c` is not finite.
        """
        rank, z_rank = self.rank(c), self.rank(z)
        z = self.insert_ones(self.cast(z, self.dtype_of(c)), batch_ndims, rank - z_rank)
        return self.sum(self.times(c, z), rank - (z_rank - batch_ndims), rank)

    def linear(
        self, leaves: Sequence[Leaf | None], z: Sequence[Tensor], dtype: str
    ) -> list[Tensor]:
        """Returns the terms `<gx_i, z_i>` of the leaves that are not None."""
        return [
            self.cast(self.inner(leaf.gx, z_i, leaf.batch_ndims), dtype)
            for leaf, z_i in zip(leaves, z, strict=True)
            if leaf is not None
        ]

    def push(self, leaves: Sequence[Leaf | None], z: Sequence[Tensor], like: Tensor) -> Tensor:
        """Returns `sum_i <gx_i, z_i>`, of the shape and dtype of `like`."""
        return self.add([self.zeros_like(like), *self.linear(leaves, z, self.dtype_of(like))])

    def transpose(self, leaf: Leaf, upstream: Tensor) -> Tensor:
        """The transpose of `z -> <gx, z>`: `B + R` to `B + D`, contracting the range."""
        gx, b = leaf.gx, leaf.batch_ndims
        domain_ndims = self.rank(leaf.x) - b
        last = self.rank(gx) - domain_ndims
        u = self.insert_ones(self.cast(upstream, self.dtype_of(gx)), last, domain_ndims)
        pulled = self.sum(self.times(self.conj(gx), u), b, last)
        return self.cast(pulled, self.dtype_of(leaf.x))

    def to_dtype(
        self, value: TensorLike, dtype: str, name: str, why: str, *, masks: bool = False
    ) -> Tensor:
        """Returns a numeric `value` as a tensor of `dtype`, never dropping an imaginary part.

        `masks`, tensors of bools, are only numbers if that is said.
        """
        # Converting a Python number to float32 first would lose digits.
        stated = dtype if structures.is_python_number(value) else None
        value = self.to_tensor(value, name, dtype=stated)
        came = self.dtype_of(value)
        if came == dtype:
            return value
        dtypes.check_cast(came, dtype, name, why, masks=masks)
        return self.as_dtype(value, dtype)

    def leaf(
        self,
        path: str,
        x: Tensor,
        gx: Tensor,
        fx: Tensor,
        batch_ndims: Ndims | None,
        names: shapes.Names,
    ) -> Leaf:
        """Converts and checks a leaf of `x` and the Jacobian of the tensor `fx` with respect to it.

        Raises:
            TypeError: A dtype has no derivatives, or a real function has a complex derivative.
            ValueError: The shapes do not fit together.
        """
        x = self.to_tensor(x, names.x)
        fx_dtype, x_dtype = self.dtype_of(fx), self.dtype_of(x)
        # A number of Python has no dtype of its own.
        is_number = structures.is_python_number(gx) or type(gx) is complex
        gx = gx if is_number else self.to_tensor(gx, names.gx)
        gx_dtype = x_dtype if is_number else self.dtype_of(gx)
        dtype = dtypes.of_jacobian(fx_dtype, gx_dtype, x_dtype, names)
        why = f"{names.fx} is {fx_dtype} and {names.x} is {x_dtype}"
        gx = self.to_dtype(gx, dtype, names.gx, why)
        known = self.shape_of(fx), self.shape_of(gx), self.shape_of(x)
        stated = batch_ndims is None or shapes.is_int(batch_ndims)
        if not (stated and shapes.is_known(*known)):
            return Leaf(path, x, *self.check_at_run_time(fx, gx, x, batch_ndims, names))
        batch_ndims = shapes.infer_batch_ndims(*known, batch_ndims, names)
        of_fx, of_gx, of_x = known
        assert of_fx is not None
        assert of_x is not None
        full = (*of_fx, *of_x[batch_ndims:])
        # A gx of rank 0 is the same partial derivative for every entry, and that of a value of one
        # entry may lack the dimensions of the value.
        return Leaf(path, x, gx if of_gx == full else self.broadcast_to(gx, full), batch_ndims)
