"""Linear systems with a Jacobian `J`, or with its transpose, and tests of their solutions.

All that is known of `J` is the pullback of the residual, the product with `J'`. It makes up the
matrix, which serves both directions, or it is passed to the caller's own method. Then products with
`J` are needed too: those with the transpose of the pullback.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.rows import Rows
from sgtrick._core import adjoint, unknown
from sgtrick._types import Function, Structure, Tensor

# From rows to rows, linear.
Product = Callable[[Tensor], Tensor]


class Solver(Protocol):
    """What solves a system of rows."""

    def solve(self, pull: Product, b: Tensor, *, transposed: bool) -> Tensor:
        """The `v` with `J' v = b` if `transposed`, else with `J v = b`; `pull` multiplies by `J'`.

        It is an error, or NaN, where a test finds that it is no solution.
        """


class Elimination(NamedTuple):
    """Solves one system for each row, by its matrix.

    A column is found for all rows at once. If these are not independent, it is a sum over several
    matrices, and products tell.

    Attributes:
        name: The residual's name in errors.
    """

    name: str

    def solve(self, pull: Product, b: Tensor, *, transposed: bool) -> Tensor:
        """See `Solver`."""
        if b.shape.as_list()[1] == 0:
            return b
        matrices = _matrices(pull, b)  # of J'
        v = tf.linalg.matvec(_inverse(matrices), b, transpose_a=not transposed)
        if b.shape.as_list()[0] == 1:
            return v
        # Where all members are equal, the sum over several matrices may be what a product is too.
        (numbers,) = adjoint.probes([v])
        w = numbers * v
        error = pull(w) - tf.linalg.matvec(matrices, w)
        size = tf.linalg.matvec(tf.abs(matrices), tf.abs(w))
        return unless(tf.reduce_all(adjoint.are_near(error, size)), _DEPENDENT.format(self.name), v)


def _matrices(product: Product, like: Tensor) -> Tensor:
    """The matrices `[rows, n, n]` that a product is with, if its rows are independent."""

    def column(unit: Tensor) -> Tensor:
        return product(tf.zeros_like(like) + unit)

    n = like.shape.as_list()[1]
    units = tf.eye(tf.shape(like)[1] if n is None else n, dtype=like.dtype)
    # Tracing a loop over columns pays off only where it happens once, and if they are many.
    if n is not None and (n <= 8 or tf.executing_eagerly()):
        return tf.stack(list(map(column, tf.unstack(units))), -1)
    return tf.transpose(tf.vectorized_map(column, units), [1, 2, 0])


def _inverse(j: Tensor) -> Tensor:
    """The inverses of matrices `[roots, n, n]`, NaN for those that are singular or not finite."""
    if j.shape.as_list()[-1] == 1:
        return _or_nan(1 / j, tf.math.is_finite(j) & tf.not_equal(j, 0))
    dtype = j.dtype
    work = dtype if dtype == tf.float64 else tf.float32
    j = tf.cast(j, work)
    n = tf.shape(j)[-1]
    # tf.linalg.inv raises for the whole batch if one matrix is singular, and so would
    # triangular_solve.
    size = tf.reduce_max(tf.abs(j), -1, keepdims=True)  # rows may differ in units
    q, r = tf.linalg.qr(j / size)
    pivots = tf.reduce_min(tf.abs(tf.linalg.diag_part(r)), -1)
    solvable = tf.reshape(pivots > 0, [-1, 1, 1])  # false for NaN
    r = tf.where(solvable, r, tf.eye(n, dtype=work))
    inverse = tf.linalg.triangular_solve(r, tf.linalg.matrix_transpose(q), lower=False)
    inverse /= tf.linalg.matrix_transpose(size)
    # Without abs, these terms would add up to the diagonal of inverse @ j, which is 1. If they
    # reach 1 / eps, no digit of the sum is right. Unlike a condition number, this does not depend
    # on units.
    terms = tf.reduce_sum(tf.abs(inverse * tf.linalg.matrix_transpose(j)), -1)
    terms = tf.reduce_max(terms, -1)
    lost = 8 * np.finfo(work.as_numpy_dtype).eps * terms * tf.cast(n, work)
    regular = solvable & tf.reshape(lost < 1, [-1, 1, 1])
    return tf.cast(_or_nan(inverse, regular), dtype)


def _or_nan(t: Tensor, holds: Tensor) -> Tensor:
    """`t`, or NaN where `holds` is false.

    A NaN that stood in the graph would be found by `tf.debugging.enable_check_numerics`.
    """
    return t + tf.sqrt(tf.cast(holds, t.dtype) - 1)


_DEPENDENT = (
    "{0} was stated to return independent equations, one system for each batch member or entry, "
    "but an equation depends on the unknowns of another member. Choose a smaller batch_ndims "
    "(with implicit_reparameterize, a larger event_ndims)."
)


class Method(NamedTuple):
    """Solves one system for all unknowns, by the caller's method, which gets the structure.

    Attributes:
        name: The residual's name in errors.
        rows: From the structure to rows, and back.
        f: The method: from a product with a matrix, and `b`, to the solution.
    """

    name: str
    rows: Rows
    f: Function

    def solve(self, pull: Product, b: Tensor, *, transposed: bool) -> Tensor:
        """See `Solver`."""
        rows, product = self.rows, pull if transposed else _transpose(self.name, pull, b)

        def matvec(v: Structure) -> Structure:
            return rows.unpack(product(rows.checked(v, "the argument of matvec")))

        v = rows.checked(self.f(matvec, rows.unpack(b)), "the result of solve")
        return unless(_solves(rows, v, product, b), _NOT_SOLVED, v)


def _transpose(name: str, pull: Product, like: Tensor) -> Product:
    """The transpose of a product."""
    (v,) = adjoint.far_probes([like])
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(v)
        # Refused or not, the product is linear in v.
        (pulled,) = unknown.unless_refused(lambda: [pull(v)], [like], [v], TWICE.format(name))
    return lambda w: tape.gradient(pulled, v, w)


# In maps, branches and functions TensorFlow traces what nobody asks for.
TWICE = (
    "For the derivative of a root, {0} had to be differentiated twice, and TensorFlow refuses that."
)


def _solves(rows: Rows, v: Tensor, product: Product, b: Tensor) -> Tensor:
    """Whether `v` solves each system that `b` consists of, up to half of the digits.

    One norm over several systems would not see what is wrong with a small one. These are
    systems of their own if `v`, with each part multiplied by another number, has a product in
    which each part is multiplied by its number.
    """
    image = product(v)
    holds = _near(_parts(rows, image - b, 0), _parts(rows, b, 0))
    for ndims, by_leaf in _divisions(rows):
        scaled = _scaled(rows, image, ndims, by_leaf=by_leaf)
        moved = product(_scaled(rows, v, ndims, by_leaf=by_leaf)) - scaled
        error, size, moved, scaled = (
            _parts(rows, t, ndims, by_leaf=by_leaf) for t in (image - b, b, moved, scaled)
        )
        holds &= _near(error, size) | ~_near(moved, scaled)
    return holds


def _divisions(rows: Rows) -> list[tuple[int, bool]]:
    """Ways to divide the unknowns: by how many leading dimensions, and whether by leaves."""
    known = [structures.static_shape(star) or () for star in rows.stars]
    if len(known) == 1:
        return [(ndims + 1, False) for ndims in range(len(known[0]))]
    by_leaf = [(ndims, True) for ndims in range(min(map(len, known)) + 1)]
    alike = [None not in n and len(set(n)) == 1 for n in zip(*known, strict=False)]
    common = itertools.takewhile(bool, alike)
    return [*by_leaf, *((ndims, False) for ndims, _ in enumerate(common, 1))]


def _scaled(rows: Rows, t: Tensor, ndims: int, *, by_leaf: bool) -> Tensor:
    """`t` with each part multiplied by another number."""
    leaves = rows.leaves(t)
    likes = [tf.zeros(tf.shape(leaf)[:ndims], leaf.dtype) for leaf in leaves]
    factors = adjoint.probes(likes) if by_leaf else [adjoint.probes([t])[0] for t in likes]

    def scaled(leaf: Tensor, factor: Tensor) -> Tensor:
        ones = tf.ones([tf.rank(leaf) - ndims], tf.int32)
        return leaf * tf.reshape(factor, tf.concat([tf.shape(factor), ones], 0))

    return rows.pack(list(map(scaled, leaves, factors)))


def _parts(rows: Rows, t: Tensor, ndims: int, *, by_leaf: bool = False) -> list[Tensor]:
    """For each part, the numbers in it, along the last dimension."""
    leaves = rows.leaves(t)
    flat = [tf.reshape(t, tf.concat([tf.shape(t)[:ndims], [-1]], 0)) for t in leaves]
    return flat if by_leaf else [tf.concat(flat, -1)]


def _near(differences: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
    """Whether the norms of differences are rounding, beside those of numbers.

    Norms are along the last dimension.
    """

    def norms(t: Tensor, unit: Tensor) -> Tensor:
        return tf.norm(structures.for_sums(t / unit), axis=-1)

    fits = []
    for difference, of in zip(differences, numbers, strict=True):
        # In units of the largest number, since squares of small ones are zero.
        largest = tf.reduce_max(tf.abs(of), -1, keepdims=True)
        unit = tf.where(largest > 0, largest, tf.ones_like(largest))
        ratio = tf.cast(norms(difference, unit) / norms(of, unit), of.dtype)
        fits.append(tf.reduce_all(adjoint.are_near(ratio, tf.ones_like(ratio))))
    return tf.reduce_all(tf.stack(fits))


_NOT_SOLVED = (
    "solve(matvec, b) returned a v for which matvec(v) is not b, not even up to half of the digits "
    "of the dtype: in all, or for a part that is a system of its own, such as a member of a batch. "
    "Raise its number of steps, lower its tolerance, make it relative to the b of each part, or "
    "use a method for matrices like the Jacobian of the residual and its transpose, which need not "
    "be symmetric."
)


def unless(holds: Tensor, message: str, t: Tensor) -> Tensor:
    """`t`, or an error with this message, or NaN, if `holds` is false."""
    zero = tf.cast(unknown.zero_if(holds, message, []), t.dtype)
    # Also a factor, so that the derivatives are NaN too; not only, since TensorFlow's optimizer may
    # take the product of a constant 0 and NaN for 0.
    return t * (1 + zero) + zero
