"""The guard: errors for derivatives of a rule's gradients that TensorFlow would lose.

A rule returns gradients, and TensorFlow differentiates them like all other tensors. So derivatives
of every order are those of the rule, and nothing is done for them here. But in two cases TensorFlow
finds no derivative, and says None or zero without a word:

* the gradient is connected to nothing with respect to which it could be differentiated: it came
  from NumPy, or is stopped;
* a host call computes it.

A gradient that is linear in upstream gradients may be connected to these alone, if NumPy cannot
have computed its other numbers: then nothing is lost.

So each gradient passes through an operation that passes derivatives on, and that also has the
inputs of the rule as its inputs. Only when this operation is differentiated, the rule is traced in
a graph that never runs. TensorFlow is asked there what the gradient is connected to. A form that
the rule calls counts as connected to all its inputs: it has a guard of its own.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments import structures
from sgtrick._arguments.structures import present
from sgtrick._core import unknown
from sgtrick._core.rule import Changed, Rule
from sgtrick._core.transposed import transposed, values_of, with_values
from sgtrick._tensorflow import connections, graphs, ongoing, operation, tapes, tracing, uses
from sgtrick._tensorflow.graphs import here
from sgtrick._tensorflow.uses import Uses
from sgtrick._types import Gradient, Operation, Tangent, Tensor

# From upstream gradients and inputs to gradients, one or None for each of the first inputs; or from
# tangents and inputs to tangents.
ExplicitRule = Callable[[Sequence[Tensor | None], Sequence[Tensor]], Sequence[Gradient]]


class Missing(NamedTuple):
    """Which derivatives of a gradient TensorFlow would lose: messages, None for those it knows."""

    by_inputs: str | None = None
    by_upstream: str | None = None


class Check:
    """Finds out what TensorFlow would lose of the gradients that a rule returns, when asked."""

    def __init__(
        self,
        name: str,
        rule: ExplicitRule,
        likes: Sequence[Tensor],
        inputs: Sequence[Tensor],
        beside: Sequence[Tensor] = (),
        *,
        is_jvp: bool = False,
    ) -> None:
        """For a rule given as a pure function; what that closes over is passed to `missing`.

        Args:
            name: The function's name in errors.
            rule: A function of tensors like `likes` and like `inputs`.
            likes: Outputs, whose upstream gradients the rule gets: None for those without
                derivatives. For a JVP rule, inputs, whose tangents it gets.
            inputs: What else the rule gets.
            beside: Some of the tensors that it closes over.
            is_jvp: Whether it returns tangents, which depend on `inputs` as all gradients do.
        """
        self._name, self._rule, self._is_jvp = name, rule, is_jvp
        self._likes = structures.differentiable(likes)
        self._inputs, self._beside = inputs, beside
        self._found = dict[Hashable, list[Missing] | Missing]()

    def missing(self, closed: Sequence[Tensor], i: int | None = None) -> Missing:
        """What is missing of gradient `i`, or of any, by inputs and what is `closed` over."""
        age = self._age()
        key = age, frozenset(map(graphs.identity_of, closed))
        if key not in self._found:
            self._found[key] = self._traced(closed, age)
        found = self._found[key]
        if isinstance(found, Missing):
            return found
        if i is not None and not self._is_jvp:
            return found[i]
        return Missing(*(next(filter(None, why), None) for why in zip(*found, strict=True)))

    def _age(self) -> int | None:
        """The age of the point if Python knows its numbers, so that NumPy may have got them."""
        known = connections.eager_sources(self._inputs)
        return tapes.oldest(known) if known else None

    def _traced(self, closed: Sequence[Tensor], age: int | None) -> list[Missing] | Missing:
        n, count = len(present(self._likes)), len(self._likes)

        def values(*ts: Tensor | None) -> list[Tensor | None]:
            with ongoing.running(), ongoing.probing():
                gradients = self._rule(ts[:count], present(ts[count:]))
                return [None if g is None else values_of(g) for g in gradients]

        def trace() -> tracing.Outline:
            return tracing.Outline(values, [*self._likes, *self._inputs])

        try:
            traced = tapes.in_thread(trace) if tapes.tapes_are_silenced() else trace()
        except Exception as error:
            if not tf.executing_eagerly():
                raise
            # What runs eagerly may do what no graph can, such as branching on values.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            why = _UNTRACEABLE.format(self._name, reason[-1].strip())
            return Missing(why, why)
        varying = connections.varying(traced.captured, traced.inner, [*closed, *self._beside])
        inputs = [*traced.inputs[n:], *varying]
        is_foreign = connections.foreign(traced, inputs, age)
        return [
            Missing() if y is None else self._missing_of(y, traced.inputs[:n], inputs, is_foreign)
            for y in traced.outputs
        ]

    def _missing_of(
        self,
        y: Tensor,
        us: Sequence[Tensor],
        inputs: Sequence[Tensor],
        is_foreign: Callable[[Operation], bool],
    ) -> Missing:
        computed = connections.Subgraph(y)
        # What is linear in upstream gradients alone does not depend on anything else.
        is_connected = connections.are_connected(y, inputs) or (
            connections.are_connected(y, us) and not any(map(is_foreign, computed.made_of(us)))
        )
        why = message(self._name)
        return Missing(
            None if is_connected and not computed.host_sees(inputs) else why,
            why if computed.host_sees(us) else None,
        )


class Guarded(Changed):
    """A rule with errors for the derivatives of its gradients that TensorFlow would lose."""

    def __init__(
        self,
        rule: Rule,
        check: Check,
        ys: Sequence[Tensor],
        inputs: Sequence[Tensor],
        of_jvp: Check | None = None,
    ) -> None:
        """A rule of outputs `ys`.

        Args:
            rule: The rule.
            check: Finds out what is missing of its gradients; of tangents, if it comes with a JVP.
            ys: The outputs.
            inputs: What the rule depends on.
            of_jvp: Finds out what is missing of tangents, if `pull` and `push` are different rules.
        """
        super().__init__(rule)
        self._check, self._of_jvp, self._ys, self._inputs = check, of_jvp, ys, inputs
        self.is_guarded, self.transposes = True, rule.push is None

    def pull(self, *upstream: Tensor | None) -> Sequence[Gradient]:
        """The gradients of the rule, guarded."""
        if ongoing.is_probe() or (tf.executing_eagerly() and not tapes.somebody_records()):
            return self._rule.pull(*upstream)
        us = [None if u is None else tf.identity(u) for u in upstream]  # not equal to an input

        def missing(closed: Sequence[Tensor], i: int) -> Missing:
            found = self._check.missing(closed, i)
            # By upstream gradients the derivative is the other rule.
            return found if self._of_jvp is None else found._replace(by_upstream=None)

        return self._guarded(lambda: self._rule.pull(*us), us, missing)

    def push(self, *tangents: Tangent) -> Sequence[Tangent]:
        """The tangents of the rule, guarded."""

        def run() -> Sequence[Tangent]:
            if callable(self._rule.push):
                return self._rule.push(*tangents)
            return transposed(self._rule, self._ys, tangents)

        if ongoing.is_probe():
            return run()
        check = self._of_jvp or self._check
        return self._guarded(run, tangents, lambda closed, _: check.missing(closed))

    def _guarded(
        self,
        run: Callable[[], Sequence[Gradient]],
        us: Sequence[Tensor | None],
        missing: Callable[[Sequence[Tensor], int], Missing],
    ) -> Sequence[Gradient]:
        """What `run` returns, each as an operation with all that it depends on as its inputs."""
        depends_on, live = list(map(here, self._inputs)), present(us)
        found, used = uses.call(run, [*live, *depends_on])
        closed = [*self._inputs, *used.all_tensors]
        depends_on += [*used.all_tensors, *map(structures.as_tensor, used.variables)]

        def one(i: int, gradient: Gradient) -> Gradient:
            def messages() -> list[str | None]:
                why = missing(closed, i)
                if operation.is_storing():  # all or nothing
                    why = Missing(*[next(filter(None, why), None)] * 2)
                return [*[why.by_inputs] * len(depends_on), *[why.by_upstream] * len(live)]

            part = unknown.refuse(values_of(gradient), [*depends_on, *live], messages)
            return with_values(gradient, part)

        return [None if g is None else one(i, g) for i, g in enumerate(found)]


def unknown_by_closure(
    name: str, rule: str, ys: Sequence[Tensor], used: Uses, passed: Sequence[Tensor]
) -> list[Tensor]:
    """The outputs of a function whose rule gives all derivatives, with errors for other ones.

    Those are derivatives with respect to tensors that it closes over, and to variables that are not
    trainable. The rule accounts for what was computed from the arguments. So if such a tensor was,
    they are derivatives with respect to all else that it was computed from.

    Args:
        name: The name of the function.
        rule: What its rule is called in errors.
        ys: The outputs.
        used: What it closes over.
        passed: Its arguments, with the handles of variables among them.

    Raises:
        ValueError: It closes over a list of tensors, of which nothing tells how it was made.
    """
    if used.has_lists:
        raise ValueError(LIST.format(name))
    handles = [v.handle for v in used.variables]
    closed = connections.unaccounted([*used.all_tensors, *used.fixed], passed, handles)
    if any(t.dtype == tf.variant for t in closed):
        raise ValueError(LIST.format(name))
    closed = list(map(tapes.value_of, closed))
    if not closed:
        return list(ys)
    message, is_of_graph = _CLOSES_OVER.format(name, rule), not tf.executing_eagerly()

    def messages() -> list[str | None]:
        # Nothing tells how an eager tensor was made. But who asks for arguments alone does not ask
        # for what else it was made of.
        is_known = tapes.asked_only_for(passed, is_of_graph=is_of_graph)
        return [None if is_known else message] * len(closed)

    return [unknown.refuse(y, closed, messages) for y in ys]


LIST = (
    "{0} closes over a tf.TensorArray, and nothing tells what that was made of. Read the array "
    "before, and pass what was read to {0} as an argument."
)

_CLOSES_OVER = (
    "{0} was differentiated with respect to a tensor that it closes over, or that an object among "
    "its arguments holds (a SparseTensor, a distribution), or with respect to what this was "
    "computed from, but its {1} only gives the gradients of arguments and of trainable variables. "
    "Pass the tensor to {0} as an argument of its own, or the variable if it is one, and make such "
    "an object of it there. If its "
    "derivative is meant to be zero, use tf.stop_gradient of it in {0}."
)


def message(name: str) -> str:
    """The error for a gradient that cannot be differentiated again."""
    return (
        f"The gradient of {name} was differentiated again, but TensorFlow sees no connection from "
        "the gradient to the point, or to whatever else it was differentiated with respect to: it "
        "was computed by a host call or by NumPy; or it was stopped, or does not depend on the "
        "point. If it really is a constant, add 0 * x to it. Otherwise compute it from TensorFlow "
        "ops, or give the host call its own gradient with one of sgtrick's functions."
    )


_UNTRACEABLE = (
    "The gradient of {0} was differentiated again, but tf.function cannot trace the gradient "
    "function ({1}). Only a trace tells whether TensorFlow can differentiate it. Write it so that "
    "tf.function can trace it."
)
