"""Roots of any structure as a matrix `[roots, unknowns of each]`."""

import math
from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._types import Ndims, Structure, Tensor, TensorLike


class Rows:
    """Roots of any structure as a matrix `[roots, unknowns of each]`.

    Attributes:
        stars: The leaves of the structure, stopped.
    """

    def __init__(
        self, x_star: Structure, batch_ndims: Ndims, name: str, theta: Sequence[object]
    ) -> None:
        self._x_star, self._name = x_star, name
        leaves = list(structures.flatten(x_star))
        beside = [x for _, x in leaves if hasattr(x, "dtype")] or theta
        self.stars = [tf.stop_gradient(floating(x, f"{name}{path}", beside)) for path, x in leaves]
        dtypes = sorted({x.dtype.name for x in self.stars})
        if len(dtypes) != 1:
            raise TypeError(
                f"{name} must have a single dtype, got {', '.join(dtypes) or 'no leaves'}. Cast "
                "all leaves to one dtype."
            )
        if isinstance(batch_ndims, int):
            _check_batches(self.stars, batch_ndims, name)
        of_stars = [_shape(x) for x in self.stars]
        self._count = _product(of_stars[0][:batch_ndims])
        self._sizes = [_product(shape[batch_ndims:]) for shape in of_stars]

    def pack(self, leaves: Sequence[Tensor]) -> Tensor:
        """From leaves to rows."""
        pairs = zip(leaves, self._sizes, strict=True)
        return tf.concat([tf.reshape(leaf, [self._count, size]) for leaf, size in pairs], 1)

    def leaves(self, rows: Tensor) -> list[Tensor]:
        """From rows to leaves."""
        leaves = []
        columns = tf.split(rows, self._sizes, 1)
        for column, star in zip(columns, self.stars, strict=True):
            leaf = tf.reshape(column, tf.shape(star))
            leaf.set_shape(star.shape)
            leaves.append(leaf)
        return leaves

    def unpack(self, rows: Tensor) -> Structure:
        """From rows to the structure."""
        return structures.pack_as(self._x_star, self.leaves(rows))

    def checked(self, returned: Structure, name: str) -> Tensor:
        """What a caller's function returned as rows, if it is like the roots."""
        leaves = []
        pairs = structures.pair(self._x_star, returned, self._name, name)
        for star, (path, _, leaf) in zip(self.stars, pairs, strict=True):
            leaf = structures.to_tensor(leaf, name + path)
            if leaf.dtype != star.dtype:
                raise TypeError(
                    f"{name}{path} has dtype {leaf.dtype.name}, expected {star.dtype.name}, the "
                    f"dtype of {self._name}{path}."
                )
            leaves.append(structures.shaped_like(leaf, star, name + path, self._name + path))
        return self.pack(leaves)


def floating(value: TensorLike, name: str, beside: Sequence[object]) -> Tensor:
    """A value as a tensor of a floating dtype; a number of Python gets that of leaves beside it."""
    value = structures.to_tensor(value, name, beside=beside)
    if not value.dtype.is_floating:
        advice = "Pass its real and imaginary parts." if value.dtype.is_complex else "Cast it."
        raise TypeError(f"{name} has dtype {value.dtype.name}, expected a floating dtype. {advice}")
    return value


def _check_batches(stars: list[Tensor], batch_ndims: int, name: str) -> None:
    known = [shape for shape in map(structures.static_shape, stars) if shape is not None]
    batches = [shape[:batch_ndims] for shape in known]
    if not all(len(b) == batch_ndims and shapes.compatible(b, batches[0]) for b in batches):
        raise ValueError(
            f"{name} must have the same leading batch_ndims={batch_ndims} dimensions in all "
            f"leaves, got {', '.join(map(shapes.show, known))}."
        )


def _shape(x: Tensor) -> list[int] | Tensor:
    """A list of ints if it is known, else a tensor."""
    return x.shape.as_list() if x.shape.is_fully_defined() else tf.shape(x)


def _product(dims: list[int] | Tensor) -> Ndims:
    return math.prod(dims) if isinstance(dims, list) else tf.reduce_prod(dims)
