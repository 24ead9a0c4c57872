"""Functions that return their own pullback, by the protocol of `tf.custom_gradient`."""

import inspect
from collections.abc import Callable, Sequence

import tensorflow as tf

from sgtrick._arguments import calls, jvp_protocol, structures, vjp_protocol
from sgtrick._arguments.nones import present
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._arguments.variables import besides
from sgtrick._core import unknown
from sgtrick._core.guard import Check, guarded, unknown_by_closure
from sgtrick._core.override import keep, with_transpose
from sgtrick._core.rule import Rule
from sgtrick._tensorflow import autograph, graphs, tapes, uses
from sgtrick._types import (
    Args,
    Function,
    Gradient,
    Kwargs,
    Structure,
    Tangent,
    Tensor,
    TensorLike,
    Variable,
)


def custom_vjp(f: Function | None = None) -> Function:
    """Decorates a function that returns its value and its vector-Jacobian product.

    The protocol is that of `tf.custom_gradient`: `f(*args) -> (y, grad_fn)`, and
    `grad_fn(*upstream)` returns the gradient of each argument. `tf.custom_gradient` silently drops
    the rule under `tf.vectorized_map` and in forward mode; here it is kept.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> @sgtrick.custom_vjp
        ... def log1pexp(x):
        ...     e = tf.exp(x)
        ...     return tf.math.log(1 + e), lambda upstream: upstream * (1 - 1 / (1 + e))
        >>> x = tf.constant([1.0, 2.0, 100.0])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = tf.vectorized_map(log1pexp, x)
        >>> tape.gradient(y, x).numpy().round(3)
        array([0.731, 0.881, 1.   ], dtype=float32)

    Args:
        f: Returns `(y, grad_fn)`, where `y` is a structure of tensors. `f` receives variables among
            the arguments as tensors, with the values that they have at the call. `grad_fn` is
            called with one upstream gradient for each leaf of `y`, only when a gradient is
            requested. It returns one gradient for each argument, in the structure of the argument
            or None, or one for each leaf of all arguments; a single argument's need not be in a
            tuple. Arguments are in the order in which `f` declares them, even if they are passed by
            keyword, keyword-only ones last; those of `**kwargs` are in the order of the call.
            Defaults that the call leaves out are arguments too, but their gradients may be left out
            unless they are tensors. What has no derivatives (int, bool, string, None) has the
            gradient None. Gradients are cast to the dtype of their argument: numbers, arrays and
            masks will do. If `f` reads trainable variables that are not among its arguments,
            `grad_fn` must take a keyword `variables`, the list of these in the order in which they
            were created, and return `(gradients, variable_gradients)`. `grad_fn` never runs in a
            forward pass, and need not be linear; loops and host calls are allowed. Higher
            derivatives are those of `grad_fn`, as TensorFlow differentiates it; in eager execution,
            they trace `f`. Forward mode transposes `grad_fn`, by differentiating it with respect to
            `upstream`, and tests the transpose at fixed pseudo-random upstream gradients.

            A gradient with respect to another tensor that `f` closes over is an error, or None if
            `f` stops the tensor. But a tensor that was computed from an argument counts as the
            argument; in eager execution, only where nothing but arguments, and variables that `f`
            reads, is differentiated. In a rule that is being run, what `f` closes over is a
            constant.

    Returns:
        A function of the arguments of `f` that returns `y`, with the decorator `defjvp` for a JVP
        rule beside the VJP rule. Methods can be decorated too. The rule is
        `jvp(primals, tangents) -> (primal_out, tangent_out)`, as for `custom_jvp`. `primals` has
        one entry for each argument, in the order of the gradients. Forward mode uses it instead of
        a transpose, so `grad_fn` need not be linear; around `tf.vectorized_map`, it is NaN. Nothing
        compares the two rules, except `check_gradient`.

    Raises:
        TypeError: `f` does not return such a pair, or uses a reference variable of TensorFlow 1;
            `grad_fn` does not take `variables`, or returned a gradient for something that has no
            derivatives, or a complex one for a real argument.
        ValueError: `grad_fn` returned another number of gradients, or one of the wrong shape; or,
            when called in a graph, `f` closes over a `tf.TensorArray`.
        LookupError: In forward mode without a JVP rule, if `grad_fn` is not linear or calls the
            host; with one, with respect to variables that `f` reads. For higher
            derivatives, if a gradient is connected to nothing with respect to which it could be
            differentiated, if a host call computes it, or if `f` cannot be traced. For a derivative
            with respect to a tensor that `f` closes over. With respect to what this tensor, or an
            argument, was computed from, such a derivative is NaN in eager execution, with a
            warning. In graphs the error is a `tf.errors.InvalidArgumentError` when the graph runs;
            around a `tf.function` and in XLA, the derivative is NaN.
        NotImplementedError: For higher derivatives in `tf.cond` or `tf.switch_case`, if the rule
            uses a tensor or variable that it closes over, which TensorFlow cannot pass there.
    """
    return custom_vjp if f is None else calls.as_form(f, _custom_vjp, "defjvp")


def _custom_vjp(function: calls.Callee) -> Function:
    f, name = function.f, function.name
    jvp: Function | None = None

    def call(converted: Callable[[Function], Function], args: Args, kwargs: Kwargs) -> Structure:
        call = function.bind(args, kwargs)
        own, names = function.receivers(call.values), function.names(call)  # self: no gradient
        passed = []
        for argument in vjp_protocol.arguments_of(call, names, own):
            for path, leaf in zip(argument.paths, argument.leaves, strict=True):
                structures.refuse(leaf, path)
                passed.append(leaf)
        call = call.with_leaves(list(map(_own_copy, call.leaves)))
        arguments = vjp_protocol.arguments_of(call, names, own)
        passed += [leaf for argument in arguments for leaf in argument.leaves]
        tensors = [_component(a) for a in passed if tf.is_tensor(a)]
        (y, grad_fn), used = uses.call(lambda: _checked_pair(f, call(converted(f))), tensors)
        variables = besides(used.variables, passed)
        rule = _Rule(f, grad_fn, arguments, y, variables)

        def explicit(us: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Gradient]:
            """The gradients with all that they depend on computed again, from other inputs."""
            y, grad_fn = _checked_pair(f, rule.with_inputs(call, inputs)(converted(f)))
            return _Rule(f, grad_fn, arguments, y, variables).pull(*us)

        def tangents(ts: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Tangent]:
            """What the JVP rule returns."""
            now, along = rule.with_inputs(call, inputs), rule.tangents(call, ts)
            primals, moving = tuple(now.values[own:]), tuple(along.values[own:])
            assert jvp is not None
            found = converted(jvp)(*now.values[:own], primals, moving)
            pushed = jvp_protocol.tangents_of(found, y, name)
            of_variables = present(ts[len(ts) - len(variables) :])
            if not of_variables:
                return pushed
            return unknown.unless_moving(_OF_VARIABLES.format(name), pushed, of_variables, inputs)

        check, of_jvp = Check(name, explicit, rule.outputs, rule.inputs), None
        given = Rule(name, rule.pull)
        if jvp is not None:
            of_jvp = Check(name, tangents, rule.inputs, rule.inputs, is_jvp=True)
            given = with_transpose(given, lambda *ts: tangents(ts, rule.inputs))
        kept = guarded(given, check, rule.outputs, rule.inputs, of_jvp)
        outputs = keep(rule.outputs, rule.inputs, kept)
        if rule.inputs:  # else the derivatives are those of y itself
            outputs = unknown_by_closure(name, "grad_fn", outputs, used, tensors)
        return rule.pack(outputs)

    form = autograph.form(call)

    def defjvp(rule: Function) -> Function:
        """Sets the JVP rule; a decorator."""
        nonlocal jvp
        jvp = jvp_protocol.rule_of(rule)
        form.has_both_rules = True  # type: ignore[attr-defined] # for check_gradient
        return rule

    form.defjvp = defjvp  # type: ignore[attr-defined]
    return form


_OF_VARIABLES = (
    "{0} was differentiated in forward mode with respect to a variable that it reads, but its JVP "
    "rule only gives the derivatives with respect to its arguments. Pass the variable as an "
    "argument."
)


def _checked_pair(f: Function, returned: Structure) -> tuple[Structure, Function]:
    """The value, as tensors, and the rule that `f` returned."""
    y, grad_fn = vjp_protocol.value_and_rule(f, returned, "grad_fn")
    return tf.nest.map_structure(_to_output, y), grad_fn


class _Rule:
    """The caller's `grad_fn` as a function of flat lists of tensors."""

    def __init__(
        self,
        f: Function,
        grad_fn: Function,
        arguments: list[vjp_protocol.Argument],
        y: Tensor,
        variables: list[Variable],
    ) -> None:
        if variables and not _takes_variables(grad_fn):
            raise TypeError(
                f"{calls.name_of(f)} reads the variables {[v.name for v in variables]}, so "
                "its grad_fn must take a keyword argument `variables` and return (gradients, "
                "variable_gradients). Alternatively, pass the variables as arguments."
            )
        self._name = f"grad_fn of {calls.name_of(f)}"
        self._grad_fn = grad_fn
        self._arguments, self._variables = arguments, variables
        leaves = [leaf for argument in arguments for leaf in argument.leaves]
        primals = [_component(leaf) if _is_input(leaf) else None for leaf in leaves]
        self._primals = [
            x if x is not None and structures.is_differentiable(x.dtype) else None for x in primals
        ]
        self.inputs = [x for x in self._primals if x is not None] + [
            structures.as_tensor(v) for v in variables
        ]
        self._y = y
        self.outputs = [_component(leaf) for leaf in tf.nest.flatten(y)]

    def with_inputs(self, call: calls.Call, inputs: Sequence[Tensor | None]) -> calls.Call:
        """The call with other tensors as inputs."""
        leaves, some = call.leaves, iter(inputs)
        for i, x in enumerate(self._primals, len(leaves) - len(self._primals)):
            if x is not None:
                leaves[i] = _with_component(leaves[i], next(some))
        return call.with_leaves(leaves)

    def tangents(self, call: calls.Call, ts: Sequence[Tensor | None]) -> calls.Call:
        """The tangents in the structure of the call, None where there is no derivative."""
        of_nothing = [None] * len(call.leaves)
        some, first = iter(ts), len(of_nothing) - len(self._primals)
        moving = [None if x is None else next(some) for x in self._primals]
        return call.with_leaves([*of_nothing[:first], *moving])

    def pack(self, outputs: Sequence[Tensor]) -> Structure:
        """Other tensors in the structure of `y`."""
        leaves = map(_with_component, tf.nest.flatten(self._y), outputs)
        return tf.nest.pack_sequence_as(self._y, list(leaves))

    def pull(self, *upstream: Tensor) -> list[Gradient]:
        """From gradients of the outputs to gradients of the inputs."""
        upstream = tuple(map(_with_component, tf.nest.flatten(self._y), upstream))
        variable_gradients: Sequence[Gradient] = []
        if self._variables:
            returned = self._grad_fn(*upstream, variables=self._variables)
            if not structures.is_pair(returned):
                raise TypeError(
                    f"{self._name} takes variables, so it must return (gradients, "
                    f"variable_gradients), got {structures.kind_of(returned)}."
                )
            returned, variable_gradients = returned
            names = [v.name for v in self._variables]
            variable_gradients = list(variable_gradients)
            if len(variable_gradients) != len(names):
                raise ValueError(
                    f"{self._name} returned {len(variable_gradients)} variable gradients, "
                    f"expected {len(names)}, one for each of {names}."
                )
        else:
            returned = self._grad_fn(*upstream)
            names = []
        kept = vjp_protocol.gradients_of(self._arguments, self._primals, returned, self._name)
        kept += [*zip(variable_gradients, (f"variable {n}" for n in names), strict=True)]
        return [
            None if g is None else self._checked(g, x, path)
            for (g, path), x in zip(kept, self.inputs, strict=True)
        ]

    def _checked(self, g: TensorLike, x: Tensor, path: str) -> Gradient:
        """A gradient in the dtype of its argument or variable `x`."""
        g = _component(g) if tf.is_tensor(g) else g
        dtype, what = x.dtype.name, f"the gradient of {path} that {self._name} returned"
        values = g.values if isinstance(g, tf.IndexedSlices) else g
        values = TENSORFLOW.to_dtype(values, dtype, what, f"{path} is {dtype}", masks=True)
        g = (
            tf.IndexedSlices(values, g.indices, g.dense_shape)
            if isinstance(g, tf.IndexedSlices)
            else values
        )
        vjp_protocol.check_shape(
            structures.static_shape(g), structures.static_shape(x), path, self._name
        )
        return g


def _takes_variables(grad_fn: Function) -> bool:
    parameters = inspect.signature(grad_fn).parameters
    return "variables" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _own_copy(leaf: TensorLike) -> TensorLike:
    """A tensor that is the call's own; composite tensors are returned unchanged.

    Variables are read now: by the time the rule runs, they may have been assigned another value.
    """
    if not structures.is_dense(leaf):
        return leaf
    t = structures.as_tensor(leaf)
    return tapes.own_copy(t) if structures.is_differentiable(t.dtype) else graphs.here(t)


def _is_input(leaf: TensorLike) -> bool:
    """Whether a gradient with respect to this argument may be requested."""
    return tf.is_tensor(leaf) or hasattr(leaf, "__tf_tensor__")


def _to_output(leaf: TensorLike) -> Tensor:
    is_composite = tf.is_tensor(leaf) and not structures.is_dense(leaf)
    return leaf if is_composite else tf.convert_to_tensor(leaf)


def _component(leaf: TensorLike) -> Tensor:
    """The tensor that holds the numbers of a composite (ragged) tensor; others are their own."""
    if isinstance(leaf, (tf.Tensor, tf.IndexedSlices)):
        return leaf
    composite = getattr(leaf, "__composite_gradient__", None)
    if composite is not None and not isinstance(leaf, tf.Variable):
        return _component(composite.get_gradient_components(leaf))
    return structures.as_tensor(leaf)


def _with_component(leaf: TensorLike, component: Tensor | None) -> Gradient:
    """`leaf` with another tensor as its component."""
    composite = getattr(leaf, "__composite_gradient__", None)
    if composite is None or component is None:
        return component
    inside = _with_component(composite.get_gradient_components(leaf), component)
    return composite.replace_gradient_components(leaf, inside)
