"""The derivatives of what an engine returns, as rules.

An engine returns its Jacobians with the values, or it has functions for products with its
derivatives, which are called when these are requested; differences are taken then, too.

Each derivative is a function of an `Evaluation`: of all tensors that it needs, which are inputs
of its rule. So it is the same function for the members of a `tf.vectorized_map`, and within loops
and branches it uses nothing from outside.
"""

import abc
import contextlib
from collections.abc import Sequence

import tensorflow as tf

from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import unknown
from sgtrick._core.kept import with_derivatives
from sgtrick._core.rule import Rule, plus
from sgtrick._host import checks
from sgtrick._host.evaluation import Evaluation
from sgtrick._host.layout import with_ones_behind
from sgtrick._tensorflow import ongoing, pfor, tapes
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Gradient, Tangent, Tensor


def differentiable_values(e: Evaluation) -> list[Tensor]:
    """The values of an evaluation, with their derivatives."""
    if not (e.points or e.call.layout.data):
        return list(e.values)
    return _Values(e).kept()


class _Result(Rule):
    """Tensors that are computed of an evaluation and of vectors, with their derivatives by both.

    Derivatives by the vectors and by the points are what a subclass says, in the graph where they
    are asked for. Derivatives by data are errors.

    Attributes:
        e: The evaluation.
        vectors: The vectors.
        is_first: Whether these are first derivatives, if they are derivatives.
    """

    def __init__(
        self, e: Evaluation, vectors: Sequence[Tensor] = (), *, is_first: bool = True
    ) -> None:
        self.e, self.vectors, self.is_first = e, list(vectors), is_first
        self.name = e.name

    @abc.abstractmethod
    def computed(self) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors, and which of them are not known if a function tells it."""

    @abc.abstractmethod
    def gradients(self, zs: Sequence[Tensor]) -> list[Gradient]:
        """The gradients by the vectors and then by the points, for cotangents of the tensors."""

    @abc.abstractmethod
    def tangents(self, ts: Sequence[Tensor], moved: Sequence[Tensor]) -> list[Tangent]:
        """The tangents, if the vectors move along `ts`, and the points along `moved`."""

    def kept(self) -> list[Tensor]:
        """The tensors with their derivatives, and which of them are not known."""
        tensors, flags = self.computed()
        self._data, self._flags = _Data(self.e), len(flags)
        return with_derivatives([*tensors, *flags], [*self.vectors, *self.e.tensors], self)

    def pull(self, *zs: Tensor) -> list[Gradient]:
        """The gradients by the vectors and by all tensors of the evaluation."""
        zs = zs[: len(zs) - self._flags]
        return [*self.here().gradients(zs), *self._data.gradients(zs)]

    def push(self, *ts: Tensor) -> list[Tangent]:
        """The tangents of the outputs along those of vectors and tensors."""
        n = len(self.vectors)
        m = n + len(self.e.points)
        along = self.here().tangents(ts[:n], ts[n:m])
        return [*self._data.refused(along, ts[m:]), *[None] * self._flags]

    def batched(self, inputs: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
        """The outputs for all members of a `tf.vectorized_map`."""
        e, vectors = self.e.of_all(self.vectors, inputs)
        return type(self)(e, vectors, is_first=self.is_first).kept()

    def here(self) -> "_Result":
        """This result, of tensors of the graph that is being traced."""
        return type(self)(self.e.here(), list(map(here, self.vectors)), is_first=self.is_first)


class _Values(_Result):
    """The values of an evaluation. Their derivatives are products of `_Vjp` and `_Jvp`."""

    def __init__(
        self, e: Evaluation, vectors: Sequence[Tensor] = (), *, is_first: bool = True
    ) -> None:
        super().__init__(e, vectors, is_first=is_first)
        if not e.gives("jvp"):
            self.push = _NO_JVP.format(e.name)  # type: ignore[method-assign, assignment]

    def computed(self) -> tuple[list[Tensor], list[Tensor]]:
        return list(self.e.values), []

    def gradients(self, zs: Sequence[Tensor]) -> list[Gradient]:
        return _vjp(self.e.with_jacobians(), zs)

    def tangents(self, ts: Sequence[Tensor], moved: Sequence[Tensor]) -> list[Tangent]:
        del ts  # there are no vectors
        return list(_jvp(self.e.with_jacobians(), moved))


# Products with Jacobians are linear, and the derivative of each along its vector is the other one.
# By the point, their derivative is the Hessian or unknown. Third derivatives are unknown.


class _Vjp(_Result):
    """The products of the transposed Jacobians with vectors like the values."""

    def computed(self) -> tuple[list[Tensor], list[Tensor]]:
        e = self.e
        if not e.extras.jacobians:
            return e.call.product("vjp", e.sent, e.extras, self.vectors, e.points)
        pulled = [
            [TENSORFLOW.transpose(leaf, u) for leaf in row]
            for row, u in zip(e.rows(), self.vectors, strict=True)
        ]
        return [tf.add_n(column) for column in zip(*pulled, strict=True)], []

    def gradients(self, zs: Sequence[Tensor]) -> list[Gradient]:
        e, us = self.e, self.vectors
        by_points = _by_points(e, self.is_first, zs, us, zs)
        if e.gives("jvp"):
            return [*_jvp(e, zs, is_first=False), *by_points]
        return [*unknown.gradients(us, _no_jvp(e, self.is_first), zs), *by_points]

    def tangents(self, ts: Sequence[Tensor], moved: Sequence[Tensor]) -> list[Tangent]:
        e, no_second = self.e, _no_second(self.e, self.is_first)
        along: list[Tangent] = list(_vjp(e, ts, is_first=False))
        if no_second:
            return unknown.unless_moving(no_second, along, moved, e.points)
        return plus(along, _second(e, self.vectors, moved))


class _Jvp(_Result):
    """The products of the Jacobians with vectors like the points, NaN where parts are not known."""

    def computed(self) -> tuple[list[Tensor], list[Tensor]]:
        e = self.e
        if not e.extras.jacobians:
            return e.call.product("jvp", e.sent, e.extras, self.vectors, e.values)
        rows = zip(e.rows(), e.values, strict=True)
        return [TENSORFLOW.push(row, self.vectors, y) for row, y in rows], []

    def gradients(self, zs: Sequence[Tensor]) -> list[Gradient]:
        by_points = _by_points(self.e, self.is_first, zs, zs, self.vectors)
        return [*_vjp(self.e, zs, is_first=False), *by_points]

    def tangents(self, ts: Sequence[Tensor], moved: Sequence[Tensor]) -> list[Tangent]:
        e, no_second = self.e, _no_second(self.e, self.is_first)
        along: list[Tangent] = list(_jvp(e, ts, is_first=False))
        if no_second or not e.call.layout.value.is_number:
            message = no_second or _NO_TWICE.format(e.name)
            return unknown.unless_moving(message, along, moved, e.points)
        (y,) = e.values
        return plus(along, [_inner(moved, _second(e, [tf.ones_like(y)], self.vectors), y)])


class _HessianProduct(_Result):
    """The Hessian of the sum of `u * value`, times `v`; the vectors are those like `v` and `u`."""

    @property
    def vs(self) -> list[Tensor]:
        """The vectors like the points."""
        return self.vectors[: len(self.e.points)]

    @property
    def us(self) -> list[Tensor]:
        """The vectors like the values; none if that is one number."""
        return self.vectors[len(self.e.points) :]

    def computed(self) -> tuple[list[Tensor], list[Tensor]]:
        e = self.e
        return e.call.product(str(e.hessp), e.sent, e.extras, [*self.us, *self.vs], e.points)

    def gradients(self, zs: Sequence[Tensor]) -> list[Gradient]:
        others = [*self.us, *self.e.points]
        message = _NO_THIRD.format(self.e.name)
        others = unknown.gradients(others, message, zs, self.vs)
        return [*_times_hessian(self.e, self.us, zs), *others]

    def tangents(self, ts: Sequence[Tensor], moved: Sequence[Tensor]) -> list[Tangent]:
        e, n = self.e, len(self.e.points)
        along = _times_hessian(e, self.us, ts[:n])
        message = _NO_THIRD.format(e.name)
        return unknown.unless_moving(message, along, [*ts[n:], *moved], [*self.us, *e.points])


def _vjp(e: Evaluation, us: Sequence[Tensor], *, is_first: bool = True) -> list[Gradient]:
    """The transposed Jacobians times vectors like the values, with errors for what is unknown."""
    if not e.gives("vjp"):
        return list(unknown.gradients(e.points, _no_gradient(e), us))
    found, n = _Vjp(e, us, is_first=is_first).kept(), len(e.points)
    if not e.extras.jacobians:
        return _known(e, found[:n], found[n:], us)
    gradients: list[Gradient] = list(found)
    for flag in e.extras.unknown:
        for row, u in enumerate(us):
            first = len(us) + row * n
            gradients = _known(e, gradients, [flag[..., first : first + n]], [u])
    return gradients


def _jvp(e: Evaluation, ts: Sequence[Tensor], *, is_first: bool = True) -> list[Tensor]:
    """The Jacobians times vectors like the points, with errors for what is unknown."""
    if not e.gives("jvp"):
        message = _NO_JVP.format(e.name)
        return [unknown.gradient(y, message, ts) for y in e.values]
    products, n, m = _Jvp(e, ts, is_first=is_first).kept(), len(e.values), len(e.points)
    for flag in e.extras.unknown:
        for row in range(n):
            for j, (t, message) in enumerate(zip(ts, _unknown(e, flag), strict=False)):
                is_lost = tf.reduce_any(flag[..., n + row * m + j])
                moved = [tf.where(is_lost, t, tf.zeros_like(t))]
                with _raising():
                    products[row : row + 1] = unknown.unless_moving(
                        message, [products[row]], moved, e.points
                    )
    return products


def _by_points(
    e: Evaluation,
    is_first: bool,
    zs: Sequence[Tensor],
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
) -> list[Gradient]:
    """The gradients of products by the points for the cotangents `zs`; errors if there are none."""
    no_second = _no_second(e, is_first)
    return list(unknown.gradients(e.points, no_second, zs)) if no_second else _second(e, us, vs)


def _second(e: Evaluation, us: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Gradient]:
    """The Hessian of the sum of `u * value`, times `v`."""
    layout = e.call.layout
    if layout.value.is_number:
        (u,) = us
        ndims = [len(layout.leaves[k].event) for k in layout.places]
        us, vs = (
            [],
            [v * tf.cast(with_ones_behind(u, n), v.dtype) for v, n in zip(vs, ndims, strict=True)],
        )
    return _times_hessian(e, us, vs)


def _times_hessian(e: Evaluation, us: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Gradient]:
    """The question `hessp` with these vectors, with errors for what is unknown."""
    found, n = _HessianProduct(e, [*vs, *us]).kept(), len(e.points)
    return _known(e, found[:n], found[n:], vs)


def _known(
    e: Evaluation,
    products: Sequence[Gradient],
    flags: Sequence[Tensor],
    zs: Sequence[Tensor],
) -> list[Gradient]:
    """Products like the points, with errors for those that the engine does not know.

    Args:
        e: The evaluation.
        products: The products.
        flags: Which of them are not known, `[batch..., points]`, if something has told it.
        zs: The cotangents, in which they are linear.
    """
    known = list(products)
    for flag in flags:
        for j, (message, x) in enumerate(zip(_unknown(e, flag), e.points, strict=False)):
            is_known = ~tf.reduce_any(flag[..., j]) | unknown.are_zero(zs)
            if not tf.executing_eagerly():
                with _raising():
                    known[j : j + 1] = unknown.known_if(is_known, message, [known[j]], [x], zs)
            elif not is_known:
                known[j] = unknown.gradient(x, message, zs, e.points)
    return known


def _raising() -> contextlib.AbstractContextManager[None]:
    """A scope for errors, which are NaN in a function that is mapped.

    There, TensorFlow would run what may raise even if nobody uses it.
    """
    is_mapped = not tf.executing_eagerly() and bool(pfor.member_indices())
    return ongoing.not_raising() if is_mapped else contextlib.nullcontext()


def _unknown(e: Evaluation, flag: Tensor) -> list[str]:
    """For each point the error if it is not known; none if all are known already."""
    if tf.executing_eagerly() and not flag.numpy().any():
        return []
    layout = e.call.layout
    return [_UNKNOWN.format(e.name, layout.leaves[k].path) for k in layout.places]


class _Data:
    """Floating leaves that have no derivatives: to ask for one is an error."""

    def __init__(self, e: Evaluation) -> None:
        layout, self._count = e.call.layout, len(e.tensors) - len(e.points)
        places = {id(t): i for i, t in enumerate(e.tensors[len(e.points) :])}
        # By the place among the tensors after the points.
        self._refused = [
            (
                places[id(e.sent[k])],
                e.sent[k],
                checks.DATA.format(e.name, layout.leaves[k].path, e.call.engine.argnums),
            )
            for k in layout.data
            if not tf.executing_eagerly() or tapes.is_recorded([e.sent[k]])
        ]

    def gradients(self, zs: Sequence[Tensor]) -> list[Gradient]:
        """The gradients by the tensors of the evaluation after the points."""
        found = list[Gradient]([None] * self._count)
        for i, x, message in self._refused:
            found[i] = unknown.gradient(here(x), message, zs)
        return found

    def refused(self, along: Sequence[Tangent], rest: Sequence[Tensor]) -> list[Tangent]:
        """Tangents, or an error if data moves; `rest` are those of tensors after the points."""
        for i, x, message in self._refused:
            along = unknown.unless_moving(message, along, [rest[i]], [here(x)])
        return list(along)


def _inner(us: Sequence[Tensor], vs: Sequence[Tensor], like: Tensor) -> Tensor:
    """The inner products for all members of a batch, a tensor like the value."""
    terms = [u * v for u, v in zip(us, vs, strict=True)]
    sums = [tf.reduce_sum(t, list(range(like.shape.rank, t.shape.rank))) for t in terms]
    return tf.add_n([tf.cast(s, like.dtype) for s in sums])


def _no_second(e: Evaluation, is_first: bool) -> str | None:
    """The error for the derivative of a product by the point, None if that is known."""
    if e.hessp:
        return None if is_first else _NO_THIRD.format(e.name)
    way = _HESSP if e.call.layout.value.is_number else _HESSP_OF_SUM
    return (_NO_SECOND if e.gives("jvp") else _NO_SECOND_NOR_JVP).format(e.name, way)


def _no_jvp(e: Evaluation, is_first: bool) -> str:
    """The error for the derivative of a product by the upstream gradient."""
    no_second = None if e.hessp or not is_first else _no_second(e, is_first)
    return no_second or _NO_JVP.format(e.name)


def _no_gradient(e: Evaluation) -> str:
    missing = _NO_VJP if "jvp" in e.call.engine.functions else _NO_GRADIENT
    return missing.format(e.name)


_UNKNOWN = (
    "{0} was asked for a derivative with respect to {1}, for which its engine returned None: it is "
    "not known. Return it; or, if {1} is data, leave it out of argnums and of the gradients."
)

_NO_GRADIENT = (
    "{0} was asked for a gradient, but its engine has none, grad=False. Return (value, gradient), "
    'pass a function as grad= or vjp=, or grad="3-point" for finite differences; or use a sampler '
    "that needs no gradient, such as tfp.mcmc.RandomWalkMetropolis."
)

_NO_VJP = (
    "{0} was asked for a gradient, but its engine has only jvp=. Pass vjp=, a function of "
    "(*arrays, u) that returns the gradients of the sum of u times the value."
)

_NO_JVP = (
    "{0} was asked for a derivative in forward mode, or for a second derivative that needs one, "
    "but its engine has no jvp=. Pass jvp=, a function of (*arrays, t) that returns the tangent of "
    "the value; or tf.stop_gradient of the arguments, if what the engine returns needs no "
    "derivative, as a root of implicit_root or an fx of custom_gradient."
)

_NO_SECOND = (
    "{0} was asked for a second derivative, but its engine gives only a value and its first "
    "derivatives. Pass {1}; from_jax and from_torch compute it themselves."
)
# Of an engine with vjp= alone.
_NO_SECOND_NOR_JVP = (
    "{0} was asked for a second derivative, but its engine gives only a value and its VJP. By an "
    "upstream gradient, as in a loss of gradients, it needs jvp=, a function of (*arrays, t) that "
    "returns the tangent of the value; by the point, {1}; and both if the value is used in a "
    "nonlinear function."
)
_HESSP = (
    "hessp=, a function of (*arrays, v) that returns the Hessian times v, such as "
    "lambda x, v: hessian(x) @ v"
)
_HESSP_OF_SUM = (
    "hessp=, a function of (*arrays, u, v) that returns the Hessian of the sum of u * value times v"
)

_NO_TWICE = (
    "{0} was asked for a second derivative by forward mode over forward mode, which hessp= does "
    "not give. Use a tape for one of the two, inside or outside."
)

_NO_THIRD = (
    "{0} was asked for a third derivative, but its engine gives only a value and its first and "
    "second derivatives."
)
