"""How the arrays of one call go in and come out: structures, shapes, dtypes, and their errors.

Every array has the shape `batch + event`. The batch is that of the call, without dimensions if an
engine is called for one member. The event shape is that of a leaf of the arguments or of the value,
or for a Jacobian that of a leaf of the value and then that of a leaf of the arguments.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._host import checks
from sgtrick._host.bound_arguments import BoundArguments, SentLeaf
from sgtrick._host.engine import QUESTIONS
from sgtrick._types import Array, DTypeLike, Structure

Shape = tuple[int, ...]
# The arrays that make up an answer, such as the value and each gradient; None for unknown ones.
Parts = list[Any]


class Space:
    """A structure of arrays: the arguments of an engine, or its value.

    Attributes:
        like: The structure, with None as its leaves.
        paths: The names of its leaves.
        shapes: Their event shapes, with None for a dimension that is only known when run.
    """

    def __init__(
        self, like: Structure, paths: Sequence[str], shapes: Sequence[shapes.Shape]
    ) -> None:
        self.like, self.paths, self.shapes = like, paths, shapes
        # A fast path for the usual cases.
        self._is_flat = type(like) is tuple and all(child is None for child in like)

    @property
    def is_number(self) -> bool:
        """Whether this is one number."""
        return self.like is None and self.shapes == [()]

    @property
    def is_known(self) -> bool:
        """Whether all dimensions are known."""
        return all(None not in shape for shape in self.shapes)

    def pack(self, leaves: Sequence[Any]) -> Structure:
        """The structure with these leaves."""
        if self.like is None:
            return leaves[0]
        return tuple(leaves) if self._is_flat else tf.nest.pack_sequence_as(self.like, leaves)

    def split(self, value: Structure, what: str) -> Sequence[Any]:
        """The leaves of a structure like this one, which errors call `what`."""
        return [value] if self.like is None else list(checks.split(value, self.like, what))


def value_space(stated: Structure) -> Space:
    """The space of a value, from `value_shape` of `from_numpy`.

    Raises:
        TypeError: It is neither a shape nor a structure of shapes.
    """
    structure = _with_leaves(stated, "value_shape")
    leaves = list(structures.flatten(structure))
    like = tf.nest.map_structure(lambda _: None, structure)
    return Space(like, [path for path, _ in leaves], [tuple(s.as_list()) for _, s in leaves])


def check_fills(value: Space, instead: float | None) -> None:
    """Raises if a number is to replace a value of unknown shape."""
    if instead is not None and not value.is_known:
        raise ValueError(
            f"on_error={instead!r} fills the value, so its shape must be known, but value_shape "
            f"is {value.pack(value.shapes)}. Pass all dimensions, or leave on_error out."
        )


class Part(NamedTuple):
    """One array of an answer: like a leaf of the value, or of the arguments, or a Jacobian.

    Attributes:
        row: The index of the leaf of the value, whose shape is in front; None without.
        column: The index of the leaf that was sent, whose shape is behind; None without.
        dtype: The dtype for TensorFlow.
        failed: What fills it where the engine failed; None for the number that `on_error` states.
        what: What errors call it.
    """

    row: int | None
    column: int | None
    dtype: np.dtype[Any]
    failed: float | None
    what: str


class Layout:
    """One kind of call of an engine: what it takes, and what it must return.

    Leaves of the arguments are counted without those that are not sent: numbers and text of Python,
    which the engine gets as they are.

    Attributes:
        name: The engine's name in errors.
        leaves: The leaves that are sent.
        value: The value.
        value_dtype: The dtype of the value.
        point: The arguments that have gradients, as gradients and vectors are structured: if there
            is one, it is not in a tuple.
        places: The indices of the leaves that have derivatives, in the order of `point`.
        data: The indices of other floating leaves.
        lists: The names of arguments that are lists.
    """

    def __init__(self, name: str, bound: BoundArguments, value: Space) -> None:
        self.name, self.value, self.value_dtype = name, value, bound.dtype
        self.like = bound.like
        pairs = zip(bound.names, bound.like, strict=True)
        self.lists = [key for key, like in pairs if isinstance(like, list)]
        self._constants, self._sent = list[Any](), list[int | None]()  # for each leaf
        self.leaves = list[SentLeaf]()
        for leaf in bound.leaves:
            self._sent.append(len(self.leaves) if leaf.sent else None)
            self._constants.append(None if leaf.sent else leaf.x)
            if leaf.sent:
                self.leaves.append(leaf.sent)
        # A fast path for the usual case.
        self._is_flat = len(bound.like) == len(self.leaves) and None not in self._sent
        self._is_flat &= not any(map(tf.nest.is_nested, bound.like))
        of_arguments = iter(range(len(bound.leaves)))
        own = [[next(of_arguments) for _ in tf.nest.flatten(arg)] for arg in bound.like]
        like = tuple(bound.like[i] for i in bound.selected)
        selected = [k for i in bound.selected for k in own[i]]
        self.point = Space(
            like[0] if len(like) == 1 else like,
            [bound.leaves[k].path for k in selected],
            [bound.leaves[k].event for k in selected],
        )
        self._selected = [self._sent[k] for k in selected]
        self.places = [k for k in self._selected if k is not None and self.leaves[k].is_point]
        self.data = [
            k for k, leaf in enumerate(self.leaves) if leaf.dtype is not None and not leaf.is_point
        ]
        # By question: a call takes microseconds.
        self._taken: dict[str, list[tuple[str, int, bool, bool]]] = {}
        self._answers: dict[str, list[Part]] = {}

    def with_float64_value(self) -> "Layout":
        """This layout with a value in float64."""
        other = copy.copy(self)
        other.value_dtype, other._answers = np.float64, {}
        return other

    # What goes in.

    def taken(self, key: str) -> list[tuple[str, int, bool, bool]]:
        """The leaves with which a question is asked.

        For each its name, its event dimensions, whether it is cast, and whether it is text.
        """
        if key not in self._taken:
            taken = [
                (leaf.path, len(leaf.event), leaf.dtype is not None, leaf.is_text)
                for leaf in self.leaves
            ]
            for w in QUESTIONS[key].vectors:
                if w == "u":
                    of = zip(self.value.paths, self.value.shapes, strict=True)
                    taken += [(f"u{path}", len(shape), True, False) for path, shape in of]
                else:
                    taken += [(f"{w} of {taken[k][0]}", *taken[k][1:]) for k in self.places]
            self._taken[key] = taken
        return self._taken[key]

    def copies(self, key: str, arrays: Sequence[Array | bytes], dtype: DTypeLike) -> list[Array]:
        """Copies for the engine, which may modify and keep them; the originals are TensorFlow's."""
        return [
            cast_copy(a, dtype) if cast else _copy(a, is_text)
            for a, (_, _, cast, is_text) in zip(arrays, self.taken(key), strict=True)
        ]

    def batch_and_events(self, key: str, leaves: Sequence[Array]) -> tuple[Shape, list[Shape]]:
        """The batch shape to which leaves broadcast, and their event shapes."""
        fronts, events = [], []
        for a, (_, n, _, _) in zip(leaves, self.taken(key), strict=True):
            fronts.append(a.shape[: a.ndim - n])
            events.append(a.shape[a.ndim - n :])
        if not fronts or fronts.count(fronts[0]) == len(fronts):
            return fronts[0] if fronts else (), events
        return np.broadcast_shapes(*fronts), events

    def arguments(self, key: str, leaves: Sequence[Any]) -> Sequence[Structure]:
        """The arguments of the function that answers."""
        n = len(self.leaves)
        arguments: Sequence[Structure] = leaves[:n]
        if not self._is_flat:
            arguments = tf.nest.pack_sequence_as(self.like, self._with_constants(leaves))
        if len(leaves) == n:
            return arguments
        groups = self._vectors(key, leaves)
        vectors = [
            self.value.pack(g) if w == "u" else self.like_points(g)
            for w, g in zip(QUESTIONS[key].vectors, groups, strict=True)
        ]
        return [*arguments, *vectors]

    def _with_constants(self, leaves: Sequence[Any]) -> list[Any]:
        pairs = zip(self._sent, self._constants, strict=True)
        return [constant if k is None else leaves[k] for k, constant in pairs]

    def _vectors(self, key: str, leaves: Sequence[Any]) -> list[list[Any]]:
        """The leaves of each vector."""
        rest, n = iter(leaves[len(self.leaves) :]), len(self.value.shapes)
        counts = [n if w == "u" else len(self.places) for w in QUESTIONS[key].vectors]
        return [list(itertools.islice(rest, count)) for count in counts]

    def like_points(self, parts: Sequence[Any]) -> Structure:
        """Parts for the leaves that have derivatives, as gradients are structured."""
        own: dict[int | None, Any] = dict(zip(self.places, parts, strict=True))
        return self.point.pack([own.get(k) for k in self._selected])

    def of_framework(
        self, key: str, leaves: Sequence[Any]
    ) -> tuple[list[Any], tuple[int, ...], list[list[Any]]]:
        """All leaves, the indices of those that have derivatives, and the leaves of vectors."""
        vectors = self._vectors(key, leaves)
        vectors = [[], *vectors] if key == "hessp" else vectors  # without u
        places = tuple(self._sent.index(k) for k in self.places)
        return self._with_constants(leaves), places, vectors

    # What comes out.

    def answer(self, key: str) -> list[Part]:
        """The parts of an answer."""
        if key not in self._answers:
            self._answers[key] = self._answer(key)
        return self._answers[key]

    def _answer(self, key: str) -> list[Part]:
        question = QUESTIONS[key]
        points = [
            Part(None, k, np.dtype(self.leaves[k].dtype), np.nan, f"{question.what} of {self.name}")
            for k in self.places
        ]
        if not question.like_value:
            return points
        # A product alone may fail where the value is valid and has a slope, so it is NaN.
        failed, dtype = None if question.is_first else np.nan, np.dtype(self.value_dtype)
        values = [
            Part(row, None, dtype, failed, f"{question.what}{path} of {self.name}")
            for row, path in enumerate(self.value.paths)
        ]
        if key != "value and Jacobian":
            return values
        for row, path in enumerate(self.value.paths):
            what = f"the gradient of {f'value{path} of ' if path else ''}{self.name}"
            values += [p._replace(row=row, failed=0.0, what=what) for p in points]
        return values

    def may_be_unknown(self, key: str) -> bool:
        """Whether the answer has several gradients, of which some may be unknown."""
        return sum(part.column is not None for part in self.answer(key)) > 1

    def shapes(self, key: str, events: Sequence[Shape]) -> list[Shape]:
        """The event shapes of the parts of an answer, with zero for unknown dimensions."""
        rows = [tuple(n or 0 for n in shape) for shape in self.value.shapes]
        return [
            (() if p.row is None else rows[p.row]) + (() if p.column is None else events[p.column])
            for p in self.answer(key)
        ]

    def event_ndims(self, key: str) -> list[int]:
        """The number of event dimensions of each part of an answer."""
        return [
            (0 if p.row is None else len(self.value.shapes[p.row]))
            + (0 if p.column is None else len(self.leaves[p.column].event))
            for p in self.answer(key)
        ]

    def parts(self, key: str, answer: Structure, batch: Shape, events: Sequence[Shape]) -> Parts:
        """The parts of an answer, checked; None for unknown ones.

        Raises:
            TypeError: It is not made of real numbers, or there is no gradient.
            ValueError: The shape or structure is wrong.
        """
        expected = self.answer(key)
        if key == "value and Jacobian":
            value, jacobian = self._pair(answer)
            found = self._like_value(key, value, expected, batch, events)
            if jacobian is None:  # no argument has derivatives
                return found
            if self.value.like is None:
                return found + self._like_point(jacobian, found[0].shape, events, expected[1:])
            n, m = len(found), len(self.places)
            rows = self.value.split(jacobian, f"the gradient of {self.name}")
            for k, (row, y) in enumerate(zip(rows, tuple(found), strict=True)):
                found += self._like_point(row, y.shape, events, expected[n + k * m :][:m])
            return found
        if QUESTIONS[key].like_value:
            return self._like_value(key, answer, expected, batch, events)
        if answer is None:
            raise TypeError(
                f"{QUESTIONS[key].what} of {self.name} must be like the arguments, got None: did "
                "you forget to return?"
            )
        return self._like_point(answer, batch, events, expected)

    def fill_unknown(
        self, key: str, parts: Parts, batch: Shape, events: Sequence[Shape]
    ) -> list[int]:
        """Makes unknown parts NaN, and returns their indices."""
        unknown = [k for k, part in enumerate(parts) if part is None]
        for k in unknown:
            row, column, *_ = self.answer(key)[k]
            assert column is not None
            front = batch if row is None else parts[row].shape
            parts[k] = np.full(front + events[column], np.nan)
        return unknown

    def check_same(self, parts: Parts, ndims: int, columns: Parts, batch: Shape, what: str) -> None:
        """Raises a ValueError if values of a member are not shaped like those in columns."""
        for path, part, column in zip(self.value.paths, parts, columns, strict=False):
            came, expected = part.shape[ndims:], column.shape[len(batch) :]
            if came != expected:
                raise ValueError(
                    f"{what}{path} of {self.name} must have the same shape for all members of a "
                    f"batch, got {shapes.show(expected)} and {shapes.show(came)}."
                )

    def _pair(self, answer: Structure) -> tuple[Structure, Structure]:
        """The value and its gradient, from what an engine returned."""
        is_pair = isinstance(answer, (tuple, list)) and len(answer) == 2
        if is_pair and (answer[1] is not None or not self.places):
            return answer[0], answer[1]
        must = f"{self.name} must return (value, gradient), got {checks.show(answer)}"
        if answer is None:
            raise TypeError(f"{must}: did you forget to return?")
        if isinstance(answer, tuple) and len(answer) > 2:
            raise TypeError(
                f"{must}. With several arguments the gradient is one tuple, and with several "
                "outputs the value is one dict or tuple, whose shapes are value_shape."
            )
        raise TypeError(
            f"{must}, a value without a gradient. Return both; or pass a function for the "
            "gradient, as grad= or vjp=; or write the function in PyTorch or JAX, and let "
            'from_torch or from_jax compute its gradient; or pass grad="3-point" for finite '
            "differences; or, for a sampler that needs no gradient, return the value alone and "
            "pass grad=False."
        )

    def _like_value(
        self,
        key: str,
        value: Structure,
        expected: Sequence[Part],
        batch: Shape,
        events: Sequence[Shape],
    ) -> Parts:
        """The leaves of a value or tangent."""
        question = QUESTIONS[key]
        cause: Any = None
        if self.value.like is None:
            if question.argument is None:
                cause = partial(checks.cause_of_shape, batch, self.value.shapes[0], events)
            return [
                checks.real_array(
                    value, batch + self.value.shapes[0], expected[0].what, cause=cause
                )
            ]
        leaves = self.value.split(value, f"{question.what} of {self.name}")
        return [
            checks.real_array(leaf, batch + shape, part.what)
            for leaf, part, shape in zip(leaves, expected, self.value.shapes, strict=False)
        ]

    def _like_point(
        self, gradient: Structure, front: Shape, events: Sequence[Shape], expected: Sequence[Part]
    ) -> Parts:
        """The gradients of the leaves that have derivatives, None for unknown ones.

        `front` is the batch shape and, of a Jacobian, the shape of the value.
        """
        is_known = len(self.places) == len(self.value.shapes) == 1
        if gradient is None and not is_known:
            return [None] * len(self.places)
        is_of_one = self.point.like is None
        if is_of_one and isinstance(gradient, tuple) and len(gradient) == 1:
            (gradient,) = gradient
        cause: Any = None
        if is_of_one and isinstance(gradient, tuple):
            cause = partial(_OF_ONE.format, self.name, *self.point.paths)
        found: Parts = []
        what = expected[0].what if expected else f"the gradient of {self.name}"
        leaves = [gradient] if is_of_one else self.point.split(gradient, what)
        for k, leaf, path in zip(self._selected, leaves, self.point.paths, strict=True):
            if k in self.places:
                if leaf is not None or is_known:
                    leaf = checks.real_array(leaf, front + events[k], what, path, cause)
                found.append(leaf)
            elif k is not None and leaf is not None:
                raise TypeError(
                    f"{what} with respect to {path} must be None, got {checks.show(leaf)}: {path} "
                    "has a dtype without derivatives. Return None there, or cast "
                    f"{path} to a float."
                )
        return found


_OF_ONE = (
    " It is a tuple, and {0} was called with one argument that has gradients, {1}: return its "
    "gradient alone."
)


def _with_leaves(stated: Structure, path: str) -> Structure:
    """The structure with `tf.TensorShape`s as its leaves, since a tuple would be a structure."""
    if isinstance(stated, tf.TensorShape):  # as a framework found it
        return stated
    if isinstance(stated, (tuple, list)) and all(
        n is None or (shapes.is_int(n) and n >= 0) for n in stated
    ):
        return tf.TensorShape(stated)
    if isinstance(stated, Mapping) and stated:
        return {key: _with_leaves(child, f"{path}[{key!r}]") for key, child in stated.items()}
    if isinstance(stated, (tuple, list)):
        make = getattr(stated, "_make", type(stated))
        return make(_with_leaves(child, f"{path}[{i}]") for i, child in enumerate(stated))
    raise TypeError(
        f"{path} must be a tuple of ints, such as (3,), or a dict or tuple of such tuples, got "
        f"{stated!r}. The batch is not part of it."
    )


def broadcast(leaves: Sequence[Array], batch: Shape, events: Sequence[Shape]) -> list[Array]:
    """The leaves of all members: what they share as read-only views, which take no memory."""
    shapes_of_all = [batch + event for event in events]
    return [
        a if a.shape == shape else np.broadcast_to(a, shape)
        for a, shape in zip(leaves, shapes_of_all, strict=True)
    ]


def _copy(array: Any, is_text: bool) -> Array:
    """A copy in its own dtype."""
    # As a NumPy string, bytes would lose trailing zeros.
    a = np.array(array, object if isinstance(array, bytes) else None)
    if is_text:
        for i, text in np.ndenumerate(a):
            a[i] = text.decode()
    return a


def cast(array: Array, dtype: DTypeLike) -> Array:
    """The array in this dtype."""
    return array if array.dtype == dtype else cast_copy(array, dtype)


def cast_copy(array: Any, dtype: DTypeLike) -> Array:
    """A copy in this dtype."""
    if array.dtype == dtype:
        return np.array(array)
    with np.errstate(all="ignore"):  # numbers outside the range of a narrower dtype overflow
        return np.array(array, dtype)


def with_ones_behind(a: Any, count: int) -> Any:
    """An array or a tensor with as many dimensions of size 1 behind its own."""
    return a[(..., *[np.newaxis] * count)] if count else a
