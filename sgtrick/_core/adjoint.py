"""Transposes of linear functions, and the dot-product test of them.

For a linear `L` and its transpose, `<u, L t> = <L' u, t>`. If TensorFlow lost a part of `L` when
transposing it, for example at a host call, or if `L` is not linear, the two sides differ for almost
all `u` and `t`. But `t` must not be where `L'` was obtained by differentiating `L`: by Euler's
theorem, `L'(t) t = L(t)` for every `L` that is positively homogeneous, such as an absolute value, a
norm, or sorting. So `L` is differentiated at `far_probes`, and tested at `probes`.

In one sum over everything, what is large hides what is lost of the small, and what is not finite
hides all. So each result is tested by itself, and in it each row, if all tensors have as many of
them; what is connected to nothing has to be zero, and arguments that nothing is connected to have
to have no effect. A row that is not finite passes.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.structures import present, spread
from sgtrick._tensorflow import graphs, linear, ongoing, pfor, tapes, tracing
from sgtrick._types import Array, DType, Gradient, Tensor

# Tensors, and as many others of the same dtypes.
Paired = tuple[list[Tensor], list[Tensor]]


def transpose(
    f: Callable[[Sequence[Tensor]], Sequence[Gradient]],
    likes: Sequence[Tensor],
    cotangents: Sequence[Tensor | None] | None,
    *,
    of_first: bool = False,
) -> tuple[list[Gradient], Tensor, list[Tensor]]:
    """The transpose of a linear function at cotangents of its results.

    Args:
        f: The function, of tensors like `likes`.
        likes: Those.
        cotangents: Of its results; None for ones, where only the test is wanted.
        of_first: Whether only the first result is tested.

    Returns:
        The transpose, None where it is zero; whether the dot-product test holds; and the tensors
        that this depends on: none if there is nothing to test.
    """

    def with_cotangents(at: Sequence[Tensor]) -> Paired:
        found = f(at)
        ones = [None if y is None else tf.ones_like(tf.convert_to_tensor(y)) for y in found]
        return paired(found, ones if cotangents is None else cotangents)

    far = far_probes(likes)
    # Not by tf.gradients, which rewrites calls of functions: tapes outside would not see what that
    # adds.
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(far)
        (ys, zs), operations = linear.with_operations(lambda: with_cotangents(far))
    # What runs eagerly may read numbers of its arguments, which no operation tells.
    is_told = not tf.executing_eagerly() and linear.are_linear(ys, far, operations)
    if not ys:
        return [None] * len(far), tf.constant(True), []
    found = tape.gradient(ys, far, zs)
    if ongoing.is_probe():
        return found, tf.constant(True), zs
    if cotangents is not None and ongoing.is_for_member() and pfor.is_unmappable(operations):
        return _OneCall(f, likes, cotangents).found()
    if is_told and None not in found:
        return list(map(tf.convert_to_tensor, found)), tf.constant(True), []
    ts = probes(likes)
    moved, _ = with_cotangents(ts)
    # Not tested at the cotangents, which are zero where only their slope is wanted.
    ws = probes(moved)
    pulled = [tape.gradient(y, far, w) for y, w in zip(ys, ws, strict=True)]
    count = 1 if of_first else len(moved)
    fits = _hold(ws, moved, pulled, ts, count)
    if tf.executing_eagerly() and not fits and None not in found:
        # A result that is all rounding fits nothing, but a trace may tell.
        fits = tf.constant(_is_linear_in_a_trace(f, likes))
    # Results that are connected to no argument, and arguments that no result is connected to.
    silent = [y for y, gs in zip(moved[:count], pulled, strict=False) if not present(gs)]
    lost = [not present(gs) for gs in zip(*pulled, strict=True)]
    if any(lost) and not all(lost):
        alone = [t if is_lost else tf.zeros_like(t) for is_lost, t in zip(lost, ts, strict=True)]
        silent += with_cotangents(alone)[0][:count]
    if silent:
        fits &= tracing.as_one(_are_zero, *silent)
    return found, fits, [*zs, *moved]


class _OneCall:
    """The transpose for one member of a map, as an operation with a rule for maps.

    TensorFlow maps branches, and differentiates what it has mapped, but does not map gradients. So
    for a batch, the function is mapped first, and then transposed.
    """

    def __init__(
        self,
        f: Callable[[Sequence[Tensor]], Sequence[Gradient]],
        likes: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
    ) -> None:
        """The function, tensors like its arguments, and cotangents of its results."""
        self._f, self._likes = f, list(map(graphs.here, likes))
        self._cotangents = cotangents
        # Not called by `_pulled`, since TensorFlow changes branches that are differentiated.
        self._member = tracing.Traced(lambda *ts: f(ts), self._likes)
        self._captured = list(map(graphs.as_used, self._member.captured))

    def found(self) -> tuple[list[Gradient], Tensor, list[Tensor]]:
        """What `transpose` returns."""
        traced = tracing.Traced(self._pulled, self._cotangents)
        *self._gradients, fits = traced(self._cotangents, traced.captured)
        assert fits is not None
        pfor.map_by(fits.op, self._of_batch)
        return list(self._gradients), fits, present(self._cotangents)

    def _pulled(self, *us: Tensor | None) -> list[Gradient]:
        with ongoing.for_member(False):
            found, fits, _ = transpose(self._f, self._likes, us)
        return [*found, fits]

    def _of_batch(self, batch: pfor.Vectorized) -> list[tuple[Tensor, bool]]:
        """The outputs of the operation for all members, and that they have a batch dimension."""

        def stacked(t: Tensor, is_stacked: bool) -> Tensor:
            return t if is_stacked else batch.stack(t)

        taken = list(map(batch.take, self._captured))
        likes = [stacked(*batch.take(t)) for t in self._likes]
        us = [stacked(*u) for u in batch.inputs[: len(present(self._cotangents))]]
        f = functools.partial(self._mapped, taken)
        pulled, fits, _ = transpose(f, likes, spread(us, self._cotangents))
        dense = [
            (tf.zeros_like(like) if g is None else tf.convert_to_tensor(g), True)
            for g, like, of_member in zip(pulled, likes, self._gradients, strict=True)
            if of_member is not None
        ]
        return [*dense, (fits, False)]

    def _mapped(self, taken: Sequence[tuple[Tensor, bool]], ts: Sequence[Tensor]) -> list[Gradient]:
        """The results of the function for all members."""
        # Of several members, only what is made of all runs. If operations of one were recorded,
        # its branches would be differentiated.
        is_one = ts[0].shape[0] == 1

        def of_one(*at: Sequence[Tensor]) -> list[Tensor]:
            with contextlib.nullcontext() if is_one else tapes.not_recording():
                return present(self._member(*at))

        return spread(pfor.over_members(of_one, ts, taken), self._member.outputs)


def _is_linear_in_a_trace(
    f: Callable[[Sequence[Tensor]], Sequence[Gradient]], likes: Sequence[Tensor]
) -> bool:
    """Whether a function is linear by its operations, where it cannot read its arguments."""

    def values(*ts: Tensor) -> Sequence[Gradient]:
        with ongoing.running(), ongoing.probing():
            return f(ts)

    try:
        traced = tracing.Outline(values, likes)
    except Exception:  # whatever a rule raises that reads them: then nothing is told
        return False
    ys = present(traced.outputs)
    return linear.are_linear(ys, traced.inputs, ys[0].graph.get_operations())


def _are_zero(*tensors: Tensor) -> Tensor:
    """Whether all entries that are finite are zero."""
    lost = [tf.reduce_any(tf.equal(t - t, 0) & tf.not_equal(t, 0)) for t in tensors]
    return ~tf.reduce_any(tf.stack(lost))


def _hold(
    us: Sequence[Tensor],
    lt: Sequence[Tensor],
    lu: Sequence[Sequence[Gradient]],
    ts: Sequence[Tensor],
    count: int,
) -> Tensor:
    """Whether `<u, L t> = <L' u, t>` up to rounding for outputs; true if that is not finite.

    Args:
        us: Probes, one for each output.
        lt: `L ts`.
        lu: For each output `L' u`, like `ts`; None is zero.
        ts: Probes, one for each argument.
        count: How many outputs are tested, the first ones. The others only tell what is rounding.
    """
    parts = [paired([y, *gs], [u, *ts]) for y, gs, u in zip(lt, lu, us, strict=True)]
    if tf.executing_eagerly():  # where operations take longer than NumPy
        eps = max(_eps(t.dtype) for values, _ in parts for t in values)
        with np.errstate(all="ignore"):
            of = itertools.starmap(_difference_in_numpy, parts)
            return tf.constant(all(_are_balanced(of, eps, np.where, np.sum)[:count]))
    balance = _Balance(tuple(len(values) for values, _ in parts), count)
    return tracing.as_one(balance, *(t for pairs in parts for of in pairs for t in of))


@dataclasses.dataclass(frozen=True)
class _Balance:
    """Whether in each group the first product with a probe has the same sum as the others.

    Attributes:
        counts: The numbers of products in the groups.
        of_first: How many of these are tested, the first ones.
    """

    counts: tuple[int, ...]
    of_first: int

    def __call__(self, *tensors: Tensor) -> Tensor:
        left, groups = iter(tensors), []
        for n in self.counts:
            groups.append(([next(left) for _ in range(n)], [next(left) for _ in range(n)]))
        eps = max(_eps(t.dtype) for t in tensors)
        of = itertools.starmap(_difference_and_size, groups)
        verdicts = _are_balanced(of, eps, tf.where, tf.reduce_sum)
        return tf.reduce_all(tf.stack(verdicts[: self.of_first]))


def _are_balanced(
    of: Iterable[tuple[Any, Any]],
    eps: float,
    where: Callable[..., Any],
    total: Callable[[Any], Any],
) -> list[Any]:
    """Whether differences of which the sum is zero are rounding, for each vector of them.

    They are, or may be, those of independent rows. If a row depends on others, its difference is
    no error, but made up for by theirs. So the rows whose difference is more than rounding have to
    make up for each other, up to what there is in other rows, and up to the rounding of everything:
    a result may be all rounding, if it cancels to zero.

    Args:
        of: Differences, and the sizes of what was added up to compute them; arrays or tensors.
        eps: The rounding unit.
        where: That of the library that these belong to.
        total: The sum, of that library.
    """
    of = list(of)
    rest = 2 * eps * sum(total(size) for _, size in of)
    found = []
    # Rounding in what is compared is not bounded by eps, so compare only half of the digits.
    tolerance = eps**0.5
    for difference, size in of:
        is_near = abs(difference) <= tolerance * size
        rounding = total(where(is_near, abs(difference), 0 * size)) + rest
        beyond = abs(total(where(is_near, 0 * size, difference))) - rounding
        found.append(beyond <= tolerance * total(where(is_near, 0 * size, size)))
    return found


def _difference_in_numpy(values: list[Tensor], at: list[Tensor]) -> tuple[Array, Array]:
    """What `_difference_and_size` returns, of eager tensors."""
    terms = [np.real(_wide(v) * np.conj(_wide(p))) for v, p in zip(values, at, strict=True)]
    rows = {t.shape[:1] for t in terms}
    n = rows.pop()[0] if len(rows) == 1 and rows != {()} and rows != {(0,)} else 1
    first, *others = flat = [t.reshape(n, -1) for t in terms]
    size = sum(np.abs(t).sum(1) for t in flat)
    difference = first.sum(1) - sum(t.sum(1) for t in others)
    is_finite = np.isfinite(size)
    return np.where(is_finite, difference, 0), np.where(is_finite, size, 0)


def _wide(t: Tensor) -> Array:
    return np.asarray(t.numpy(), np.complex128 if t.dtype.is_complex else np.float64)


def _difference_and_size(values: list[Tensor], at: list[Tensor]) -> tuple[Tensor, Tensor]:
    """How much the first product exceeds the sum of the others, and their size, for each row.

    Zeros if they are not finite.
    """
    terms = list(map(_term, values, at))
    rows = _rows(terms)
    first, *others = [tf.cast(_sums(t, rows), tf.float64) for t in terms]
    size = tf.add_n([tf.cast(_sums(tf.abs(t), rows), tf.float64) for t in terms])
    difference, zeros = tf.add_n([first, *map(tf.negative, others)]), tf.zeros_like(size)
    is_finite = tf.math.is_finite(size)
    return tf.where(is_finite, difference, zeros), tf.where(is_finite, size, zeros)


def _rows(tensors: Sequence[Tensor]) -> int | Tensor | None:
    """The leading dimension of all these tensors, None if they differ."""
    if any(t.shape.rank in (None, 0) for t in tensors):
        return None
    known = {t.shape.as_list()[0] for t in tensors} - {None}
    if len(known) > 1:
        return None
    counts = [tf.shape(t)[0] for t in tensors if t.shape.as_list()[0] is None]
    if not counts:
        return known.pop() or None
    counts += map(tf.constant, known)
    are_equal = tf.reduce_all(tf.equal(tf.stack(counts), counts[0])) & (counts[0] > 0)
    return tf.where(are_equal, counts[0], 1)


_BLOCKS = 1024


def _sums(t: Tensor, rows: int | Tensor | None) -> Tensor:
    """The sums of rows; of blocks of them if they are very many, which would take time."""
    if rows is None:
        return tf.reshape(tf.reduce_sum(t), [1])
    size = rows // _BLOCKS + 1
    count = rows // size
    if isinstance(rows, int):
        # Where possible without a rest, for which the tensor would be copied.
        even = next(n for n in range(min(rows, _BLOCKS), 0, -1) if rows % n == 0)
        if even >= count // 8:
            return tf.reduce_sum(tf.reshape(t, [even, -1]), 1)
    flat = tf.reshape(t, [rows, -1])
    blocks = tf.reduce_sum(tf.reshape(flat[: count * size], [count, -1]), 1)
    return tf.concat([blocks, [tf.reduce_sum(flat[count * size :])]], 0)


def are_near(difference: Tensor, size: Tensor) -> Tensor:
    """Whether differences are rounding, entry by entry; true where they are NaN.

    Args:
        difference: Differences of numbers.
        size: The sizes of what was added up to compute these numbers.
    """
    tolerance = tf.cast(_eps(size.dtype) ** 0.5, size.dtype)
    # Not written as "not greater", which TensorFlow's optimizer turns into "less or equal", false
    # for NaN. Stopped, since the second JVP of is_nan fails in a function.
    is_nan = tf.math.is_nan(tf.stop_gradient(difference))
    return (tf.abs(difference) <= tolerance * size) | is_nan


def probes(likes: Sequence[Tensor]) -> list[Tensor]:
    """Generic directions: fixed pseudo-random numbers of order 1."""
    return [_direction(t, k, far=False) for k, t in enumerate(likes)]


def far_probes(likes: Sequence[Tensor]) -> list[Tensor]:
    """Other ones, about a thousand times as large and of the opposite signs.

    A function that clips, or that depends on signs or on the order of entries, is not linear in the
    same way here and there, entry by entry.
    """
    return [_direction(t, k, far=True) for k, t in enumerate(likes)]


_MANY = 1024  # a power of two, so that scaling does not round


def _direction(like: Tensor, k: int, *, far: bool) -> Tensor:
    size = like.shape.num_elements()
    if size is not None and size <= _COUNT:
        return tf.constant(numbers(tuple(like.shape.as_list()), like.dtype, k, far=far))
    flat = tf.constant(numbers((_COUNT,), like.dtype, k, far=far))
    n = tf.size(like)
    t = tf.reshape(tf.tile(flat, [n // _COUNT + 1])[:n], tf.shape(like))
    t.set_shape(like.shape)
    return t


_COUNT = 1009  # a prime number, so that tiles never align with the rows of a matrix


@functools.lru_cache(1024)
def numbers(shape: tuple[int, ...], dtype: DType, k: int, *, far: bool) -> Array:
    """The numbers for the tensor at position `k` among the arguments."""
    e = np.random.default_rng(k).uniform(size=[2, *shape])
    # A third has the other sign: neighbours differ, and signs alone do not cancel out.
    few = np.indices(e.shape).sum(0) % 3 == 2
    signs = np.where(few, -1, 1)
    # The smaller of any two entries is the larger one far away, and of two with different signs
    # also the one whose size is smaller.
    re, im = -signs * _MANY * 2 ** (e**2 - 1 + few) if far else signs * 2 ** (e - few)
    both: Array = re + 1j * im if dtype.is_complex else re
    return both.astype(dtype.as_numpy_dtype)


def paired(some: Sequence[Gradient], others: Sequence[Tensor | None]) -> Paired:
    """The pairs without None, as tensors of one dtype: such as gradients and tangents."""
    pairs = [
        (tf.convert_to_tensor(a), b)  # IndexedSlices, for a table that is gathered from
        for a, b in zip(some, others, strict=True)
        if a is not None and b is not None
    ]
    return [a for a, _ in pairs], [
        b if b.dtype == a.dtype else tf.cast(b, a.dtype) for a, b in pairs
    ]


def _term(value: Tensor, probe: Tensor) -> Tensor:
    """Their product, entry by entry."""
    if value.dtype.is_complex:
        return tf.math.real(value * tf.math.conj(probe))
    return structures.for_sums(value) * structures.for_sums(probe)


def _eps(dtype: DType) -> float:
    if dtype == tf.bfloat16:  # NumPy does not know it
        return 2.0**-7
    return float(np.finfo(dtype.real_dtype.as_numpy_dtype).eps)
