"""The derivatives of what an engine returns, as kept overrides.

An engine returns its Jacobians with the values, or it has functions for products with its
derivatives, which are called when these are requested; differences are taken then, too.

Each derivative is a function of an `Evaluation`: of all tensors that it needs, which are inputs of
its override. So it is the same function for the members of a `tf.vectorized_map`, and within loops
and branches it uses nothing from outside.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sgtrick._arguments.structures import Leaf
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import unknown
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule, plus
from sgtrick._host import checks
from sgtrick._host.host_call import HostCall, ValueExtras, as_high
from sgtrick._tensorflow import mapping, tapes
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Gradient, Tangent, Tensor


class Evaluation(NamedTuple):
    """One call of an engine for its values.

    Attributes:
        call: The host call.
        sent: The leaves that were sent; batch dimensions that members share may have size 1.
        points: The leaves that have derivatives, with the batch of the values.
        values: The values.
        extras: What came with these.
    """

    call: HostCall
    sent: Sequence[Tensor]
    points: Sequence[Tensor]
    values: Sequence[Tensor]
    extras: ValueExtras

    @property
    def name(self) -> str:
        """The name of the engine in errors."""
        return self.call.layout.name

    def gives(self, key: str) -> bool:
        """Whether there are products with the Jacobians, by these or by a function."""
        functions = self.call.engine.functions
        return bool(self.extras.jacobians or self.call.engine.scheme or key in functions)

    @property
    def hessp(self) -> str | None:
        """The question for second derivatives, if there is an answer."""
        return self.call.engine.hessp(self.call.layout.value.is_number)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, each once. First the points."""
        groups = [self.points, self.sent, self.values, *self.extras]
        return list({id(t): t for group in groups for t in group}.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Evaluation":
        """The same with other tensors."""
        others = {id(t): other for t, other in zip(self.tensors, tensors, strict=True)}

        def taken(group: Sequence[Tensor]) -> list[Tensor]:
            return [others[id(t)] for t in group]

        points, sent, values = map(taken, (self.points, self.sent, self.values))
        return Evaluation(self.call, sent, points, values, ValueExtras(*map(taken, self.extras)))

    def here(self) -> "Evaluation":
        """The same in the graph that is being traced."""
        return self if tf.executing_eagerly() else self.with_tensors(list(map(here, self.tensors)))

    def with_jacobians(self) -> "Evaluation":
        """The same with differences, if these are taken."""
        if self.extras.jacobians or not self.call.engine.scheme:
            return self
        jacobians = self.call.differences(self.sent, self.extras)
        found = self._replace(extras=self.extras._replace(jacobians=jacobians))
        found.set_shapes()
        return found

    def set_shapes(self) -> None:
        """Sets the static shapes of what came with the values, as far as they are known."""
        y, n = self.values[0], len(self.call.layout.value.shapes[0])
        batch = y.shape[: y.shape.rank - n]
        for t, y in zip(self.extras.in_float64, self.values, strict=False):
            t.set_shape(y.shape)
        for t in [*self.extras.failed, *self.extras.precision]:
            t.set_shape(batch)
        for t in self.extras.unknown:
            t.set_shape(batch.concatenate([None]))
        for row, y in zip(self.rows(), self.values, strict=False):
            for leaf in row:
                leaf.gx.set_shape(y.shape.concatenate(leaf.x.shape[batch.rank :]))

    def rows(self) -> list[list[Leaf]]:
        """For each value, the points with its Jacobians, if these are known."""
        layout, m = self.call.layout, len(self.points)
        ndims = self.values[0].shape.rank - len(layout.value.shapes[0])
        leaves = [
            Leaf(layout.leaves[k].path, x, gx, ndims)
            for (k, x), gx in zip(
                list(zip(layout.places, self.points, strict=True)) * len(self.values),
                self.extras.jacobians,
                strict=False,
            )
        ]
        return [leaves[i : i + m] for i in range(0, len(leaves), m)] if m else []

    def of_all(
        self, vectors: Sequence[Tensor], inputs: Sequence[tuple[Tensor, bool]]
    ) -> tuple["Evaluation", list[Tensor]]:
        """The same, and vectors, for all members of a `tf.vectorized_map`.

        `inputs` are the vectors and then its tensors, and whether each has a batch dimension.
        """
        sizes = [(t.shape[0], tf.shape(t)[:1]) for t, is_stacked in inputs if is_stacked]
        sent_alone = {id(t) for t in self.sent} - {id(t) for t in self.points}
        tensors = []
        for (t, is_stacked), like in zip(inputs, [*vectors, *self.tensors], strict=True):
            if sizes and not is_stacked:
                t = t[tf.newaxis]
                if id(like) not in sent_alone:  # the host broadcasts these itself
                    t = tf.broadcast_to(t, tf.concat([sizes[0][1], tf.shape(t)[1:]], 0))
            t.set_shape([t.shape[0], *like.shape] if sizes else like.shape)
            tensors.append(t)
        return self.with_tensors(tensors[len(vectors) :]), tensors[: len(vectors)]


def embedded(e: Evaluation) -> list[Tensor]:
    """The values with their derivatives."""
    if not (e.points or e.call.layout.data):
        return list(e.values)
    data = _Data(e)

    def pull(*us: Tensor) -> list[Gradient]:
        now = e.here().with_jacobians()
        return [*_vjp(now, us), *data.gradients(us)]

    def push(*ts: Tensor) -> list[Tangent]:
        now, n = e.here().with_jacobians(), len(e.points)
        return data.refused(_jvp(now, ts[:n]), ts[n:])

    def batched(inputs: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
        return embedded(e.of_all([], inputs)[0])

    rule = Rule(e.name, pull, push if e.gives("jvp") else _NO_JVP.format(e.name), batched=batched)
    return keep(e.values, e.tensors, rule)


# Products with Jacobians are linear, and the derivative of each along its vector is the other one.
# By the point, their derivative is the Hessian or unknown. Third derivatives are unknown.


def _vjp(e: Evaluation, us: Sequence[Tensor], *, is_first: bool = True) -> list[Gradient]:
    """The products of the transposed Jacobians with vectors like the values."""
    if not e.gives("vjp"):
        return list(unknown.failures(e.points, _no_gradient(e), us))
    found, n = _pulled(e, us, is_first), len(e.points)
    if not e.extras.jacobians:
        return _known(e, found, us)
    for flag in e.extras.unknown:
        for row, u in enumerate(us):
            first = len(us) + row * n
            found = _known(e, [*found, flag[..., first : first + n]], [u])
    return list(found)


def _pulled(e: Evaluation, us: Sequence[Tensor], is_first: bool) -> list[Tensor]:
    """The same, and which of them are not known if a function tells it."""
    data, no_second = _Data(e), _no_second(e, is_first)
    products, flags = _transposed(e, us)

    def pull(*zs: Tensor) -> list[Gradient]:
        now, vs, zs = e.here(), list(map(here, us)), zs[: len(products)]
        by_points = _by_points(now, no_second, zs, vs, zs)
        if e.gives("jvp"):
            by_us: Sequence[Gradient] = _jvp(now, zs, is_first=False)
        else:
            by_us = unknown.failures(vs, _no_jvp(e, is_first), zs)
        return [*by_us, *by_points, *data.gradients(zs)]

    def push(*ts: Tensor) -> list[Tangent]:
        now, vs = e.here(), list(map(here, us))
        zs, moved, rest = _split(e, ts, len(us))
        along: list[Tangent] = list(_vjp(now, zs, is_first=False))
        if no_second:
            along = unknown.unless_moving(no_second, along, moved, now.points)
        else:
            along = plus(along, _second(now, vs, moved))
        return [*data.refused(along, rest), *[None] * len(flags)]

    def batched(inputs: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
        of_all, vectors = e.of_all(us, inputs)
        return _pulled(of_all, vectors, is_first)

    rule = Rule(e.name, pull, push, batched=batched, is_of_caller=True)
    return keep([*products, *flags], [*us, *e.tensors], rule)


def _jvp(e: Evaluation, ts: Sequence[Tensor], *, is_first: bool = True) -> list[Tensor]:
    """The products of the Jacobians with vectors like the points."""
    if not e.gives("jvp"):
        message = _NO_JVP.format(e.name)
        return [unknown.failure(y, message, ts) for y in e.values]
    products, n, m = _pushed(e, ts, is_first), len(e.values), len(e.points)
    for flag in e.extras.unknown:
        for row, y in enumerate(products):
            for j, (t, message) in enumerate(zip(ts, _unknown(e, flag), strict=False)):
                is_lost = tf.reduce_any(flag[..., n + row * m + j]) & ~unknown.are_zero([t])
                y += _zero(is_lost, message, y)
            products[row] = y
    return products


def _pushed(e: Evaluation, ts: Sequence[Tensor], is_first: bool) -> list[Tensor]:
    """The same, NaN where parts are not known."""
    data, no_second = _Data(e), _no_second(e, is_first)

    def pull(*zs: Tensor) -> list[Gradient]:
        now, vs = e.here(), list(map(here, ts))
        by_points = _by_points(now, no_second, zs, zs, vs)
        return [*_vjp(now, zs, is_first=False), *by_points, *data.gradients(zs)]

    def push(*tangents: Tensor) -> list[Tangent]:
        now, vs = e.here(), list(map(here, ts))
        zs, moved, rest = _split(e, tangents, len(ts))
        along = _jvp(now, zs, is_first=False)
        if no_second or not e.call.layout.value.is_number:
            message = no_second or _NO_TWICE.format(e.name)
            return data.refused(unknown.unless_moving(message, along, moved, now.points), rest)
        (y,) = now.values
        bent = _second(now, [tf.ones_like(y)], vs)
        return data.refused(plus(along, [_inner(moved, bent, y)]), rest)

    def batched(inputs: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
        of_all, vectors = e.of_all(ts, inputs)
        return _pushed(of_all, vectors, is_first)

    rule = Rule(e.name, pull, push, batched=batched, is_of_caller=True)
    return keep(_times(e, ts), [*ts, *e.tensors], rule)


def _by_points(
    e: Evaluation,
    no_second: str | None,
    zs: Sequence[Tensor],
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
) -> list[Gradient]:
    """The gradients of products by the points for the cotangents `zs`; errors if there are none."""
    return list(unknown.failures(e.points, no_second, zs)) if no_second else _second(e, us, vs)


def _second(e: Evaluation, us: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Gradient]:
    """The Hessian of the sum of `u * value`, times `v`."""
    if e.call.layout.value.is_number:
        (u,) = us
        us, vs = [], [v * tf.cast(as_high(u, v), v.dtype) for v in vs]
    return _times_hessian(e, us, vs)


def _times_hessian(e: Evaluation, us: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Gradient]:
    return _known(e, _second_of(e, us, vs), vs)


def _second_of(e: Evaluation, us: Sequence[Tensor], vs: Sequence[Tensor]) -> list[Tensor]:
    """The products, and which of them are not known if a function tells it."""
    products, flags = e.call.product(str(e.hessp), e.sent, e.extras, [*us, *vs], vs)
    data, no_third, n = _Data(e), _NO_THIRD.format(e.name), len(us)

    def pull(*zs: Tensor) -> list[Gradient]:
        now, now_us, now_vs = e.here(), list(map(here, us)), list(map(here, vs))
        zs = zs[: len(vs)]
        others = unknown.failures([*now_us, *now.points], no_third, zs, now_vs)
        return [*_times_hessian(now, now_us, zs), *others, *data.gradients(zs)]

    def push(*tangents: Tensor) -> list[Tangent]:
        now, now_us = e.here(), list(map(here, us))
        zs, moved, rest = tangents[: len(vs)], *_split(e, tangents[len(vs) :], n)[1:]
        moved = [*tangents[len(vs) :][:n], *moved]
        along = _times_hessian(now, now_us, zs)
        of = [*now_us, *now.points]
        along = unknown.unless_moving(no_third, along, moved, of)
        return [*data.refused(along, rest), *[None] * len(flags)]

    def batched(inputs: Sequence[tuple[Tensor, bool]]) -> list[Tensor]:
        of_all, vectors = e.of_all([*vs, *us], inputs)
        return _second_of(of_all, vectors[len(vs) :], vectors[: len(vs)])

    rule = Rule(e.name, pull, push, batched=batched, is_of_caller=True)
    return keep([*products, *flags], [*vs, *us, *e.tensors], rule)


def _split(
    e: Evaluation, tangents: Sequence[Tensor], n: int
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Tangents of `n` vectors, of the points, and of the other tensors of an evaluation."""
    m = n + len(e.points)
    return tangents[:n], tangents[n:m], tangents[m:]


def _transposed(e: Evaluation, us: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The products of the transposed Jacobians, and which are not known if a function tells it."""
    if not e.extras.jacobians:
        return e.call.product("vjp", e.sent, e.extras, us, e.points)
    pulled = [
        [TENSORFLOW.transpose(leaf, u) for leaf in row] for row, u in zip(e.rows(), us, strict=True)
    ]
    return [tf.add_n(column) for column in zip(*pulled, strict=True)], []


def _times(e: Evaluation, ts: Sequence[Tensor]) -> list[Tensor]:
    """The products of the Jacobians with vectors like the points."""
    if not e.extras.jacobians:
        return e.call.product("jvp", e.sent, e.extras, ts, e.values)[0]
    return [TENSORFLOW.push(row, ts, y) for row, y in zip(e.rows(), e.values, strict=True)]


def _known(e: Evaluation, found: Sequence[Any], zs: Sequence[Tensor]) -> list[Gradient]:
    """Products like the points, with errors for those that the engine does not know.

    If something has told which these are, it follows in `found`.
    """
    products = list(found[: len(e.points)])
    for flag in found[len(e.points) :]:
        for j, message in enumerate(_unknown(e, flag)):
            is_lost = tf.reduce_any(flag[..., j]) & ~unknown.are_zero(zs)
            if not tf.executing_eagerly():
                products[j] += _zero(is_lost, message, e.points[j])
            elif is_lost:
                products[j] = unknown.failure(e.points[j], message, zs, e.points)
    return products


def _zero(is_lost: Tensor, message: str, like: Tensor) -> Tensor:
    """Zero, or an error where something is lost; in a function that is mapped, NaN.

    There, TensorFlow would run what may raise even if nobody uses it.
    """
    if not tf.executing_eagerly() and mapping.member_indices():
        nan, zero = (tf.constant(number, like.dtype) for number in (float("nan"), 0.0))
        return tf.where(is_lost, nan, zero)
    return tf.cast(unknown.zero_if(~is_lost, message, []), like.dtype)


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
        """Those by the tensors of the evaluation after the points."""
        found = list[Gradient]([None] * self._count)
        for i, x, message in self._refused:
            found[i] = unknown.failure(here(x), message, zs)
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
