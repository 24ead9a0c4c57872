"""Functions that return their own pullback, by the protocol of `tf.custom_gradient`."""

from __future__ import annotations  # signatures that show the names of types

import inspect
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from sgtrick._arguments import calls, jvp_protocol, shapes, structures, vjp_protocol
from sgtrick._arguments.returned import pair_of
from sgtrick._arguments.structures import numbers_of, present, spread, with_numbers
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import unknown
from sgtrick._core.covered import CoveredArguments
from sgtrick._core.guarded import Check, Guarded, unknown_by_closure
from sgtrick._core.kept import WithTranspose, with_derivatives
from sgtrick._core.reachable import once
from sgtrick._core.rule import Rule, Stated
from sgtrick._core.transposed import with_values
from sgtrick._tensorflow import autograph, graphs, ongoing, tapes, uses
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

T = TypeVar("T")


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
        f: Returns `(y, grad_fn)`, where `y` is a structure of tensors, and of None for nothing. `f`
            receives variables among the arguments as tensors, with the values that they have at the
            call. `grad_fn` is called with one upstream gradient for each leaf of `y`, None for
            None, only when a gradient is requested. It returns one gradient for each argument, in
            the structure of the argument or None, or one for each leaf of all arguments; a single
            argument's need not be in a tuple. Arguments are in the order in which `f` declares
            them, even if they are passed by keyword, keyword-only ones last; those of `**kwargs`
            are in the order of the call. Those that have their default are arguments too, passed or
            not, but their gradients may be left out unless they are tensors. What has no
            derivatives (int, bool, string, None) has the gradient None; of ints and bools, zeros in
            their shape count as None, if they are known to be zeros. Gradients are cast to the
            dtype of their argument: numbers, arrays and masks will do. If `f` reads trainable
            variables that are not among its arguments, `grad_fn` must take a keyword `variables`,
            the list of these in the order in which they were created, and return `(gradients,
            variable_gradients)`. `grad_fn` never runs in a forward pass, and need not be linear;
            loops and host calls are allowed. Higher derivatives are those of `grad_fn`, as
            TensorFlow differentiates it; in eager execution, they trace `f`. Forward mode
            transposes `grad_fn`, by differentiating it with respect to `upstream`, and tests the
            transpose at fixed pseudo-random upstream gradients.

            A gradient with respect to another tensor that `f` closes over is an error, or None if
            `f` stops the tensor. But a tensor that was computed from an argument counts as the
            argument; in eager execution, only where nothing but arguments is differentiated. In a
            rule that is being run, what `f` closes over is a constant.

    Returns:
        A function of the arguments of `f` that returns `y`, with the decorator `defjvp` for a JVP
        rule beside the VJP rule. Methods can be decorated too. The rule is
        `jvp(primals, tangents) -> (primal_out, tangent_out)`, as for `custom_jvp`. `primals` has
        one entry for each argument, in the order of the gradients. Forward mode uses it instead of
        a transpose, so `grad_fn` need not be linear. Nothing compares the two rules, except
        `check_gradient`.

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
            with respect to a tensor that `f` closes over, or to a variable that is not trainable.
            With respect to what this tensor, or an argument, was computed from, such a derivative
            is NaN in eager execution, with a warning. In graphs the error is a
            `tf.errors.InvalidArgumentError` when the graph runs; around a `tf.function` and in XLA,
            the derivative is NaN.
        NotImplementedError: For higher derivatives in `tf.cond` or `tf.switch_case`, if the rule
            uses a tensor or variable that it closes over, which TensorFlow cannot pass there.
    """
    return custom_vjp if f is None else calls.as_form(f, lambda f: _CustomVjp(f).form, "defjvp")


class _CustomVjp:
    """A function that returns its pullback, and perhaps a JVP rule beside that."""

    def __init__(self, function: calls.Callee) -> None:
        self.function = function
        self.jvp: Function | None = None
        self.form = autograph.form(self.__call__)
        self.form.defjvp = self.defjvp  # type: ignore[attr-defined]

    def __call__(self, converted: autograph.Converted, args: Args, kwargs: Kwargs) -> Structure:
        """The value of a call, whose derivatives are those of the rules."""
        return _Evaluation(self, converted, args, kwargs).value()

    def defjvp(self, rule: Function) -> Function:
        """Sets the JVP rule; a decorator."""
        self.jvp = jvp_protocol.rule_of(rule)
        self.form.has_both_rules = True  # type: ignore[attr-defined] # for check_gradient
        return rule


class _Evaluation:
    """The function at a point, with its rules, there and from other inputs.

    The inputs are the point, all arguments that have derivatives, and the variables that the
    function reads besides.
    """

    def __init__(
        self, form: _CustomVjp, converted: autograph.Converted, args: Args, kwargs: Kwargs
    ) -> None:
        self._form, self._converted = form, converted
        function, self._name = form.function, form.function.name
        call = function.bind(args, kwargs)
        self._own, names = function.receivers(call.values), function.names(call)
        others = range(self._own, len(call.values))  # self of a method has no gradient
        self._covered = CoveredArguments(call, others, names, _is_input)
        self._frozen = self._covered.read()
        # Forward mode does not look into f, unless the rule, which may close over what f computes,
        # is differentiated too.
        self._is_hidden = tapes.pushed_alone(self._covered.xs)
        xs = self._covered.xs
        xs = list(map(tapes.unpushed, xs)) if self._is_hidden else xs
        (self._y, self._grad_fn), self._used = uses.call(
            lambda: self._value_and_rule(self._covered.with_xs(xs, self._frozen)),
            [*self._covered.tensors, *xs],
            # What a rule closes over is a constant for its calls.
            variables_alone=ongoing.is_running(),
        )
        self._variables = _besides(self._used.variables, call.leaves)
        self._inputs = [*self._covered.xs, *map(structures.as_tensor, self._variables)]
        defaulted = function.defaulted(call)
        self._arguments = vjp_protocol.arguments_of(function, self._frozen, self._own, defaulted)
        self._check_variables()

    def value(self) -> Structure:
        """The value, with the derivatives of the rules."""
        name, inputs = self._name, self._inputs
        leaves = present(tf.nest.flatten(self._y))
        results = map(numbers_of, leaves)
        # An argument that is returned has the gradient of the rule, and not one of its own.
        ys = [tf.identity(y) if any(y is x for x in inputs) else y for y in results]
        check, of_jvp = Check(name, self.pull_from, ys, inputs, self._used.beside), None
        rule: Rule = Stated(name, once(self.pull, ys))
        if self._form.jvp is not None:
            of_jvp = Check(name, self.push_from, inputs, inputs, is_jvp=True)
            rule = WithTranspose(rule, self.push, inputs)
        outputs = with_derivatives(ys, inputs, Guarded(rule, check, ys, inputs, of_jvp))
        outputs = unknown_by_closure(name, "grad_fn", outputs, self._used, self._covered.tensors)
        return structures.pack_present(self._y, list(map(with_numbers, leaves, outputs)))

    def pull(self, *us: Tensor | None) -> list[Gradient]:
        """What the rule returns for upstream gradients."""
        if self._is_hidden and tapes.is_pushed(self._inputs):
            # A tape of variables that runs in the accumulator differentiates the rule.
            return self.pull_from(us, self._inputs)
        return self._gradients(self._grad_fn, self._y, us, self._inputs)

    def pull_from(self, us: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Gradient]:
        """What the rule returns, with all that it depends on computed again from other inputs."""
        y, grad_fn = self._value_and_rule(
            self._covered.with_xs(self._of_point(inputs), self._frozen)
        )
        return self._gradients(grad_fn, y, us, inputs)

    def push(self, *ts: Tensor | None) -> Sequence[Tangent]:
        """What the JVP rule returns for tangents of the inputs."""
        return self.push_from(ts, self._inputs)

    def push_from(self, ts: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> Sequence[Tangent]:
        """What the JVP rule returns for tangents of other inputs."""
        assert self._form.jvp is not None
        covered, receiver = self._covered, self._frozen.values[: self._own]
        primals = covered.primals(covered.with_xs(self._of_point(inputs), self._frozen))
        tangents = covered.tangents(self._of_point(ts))
        found = self._converted(self._form.jvp)(*receiver, primals, tangents)
        pushed = jvp_protocol.tangents_of(found, self._y, self._name)
        of_variables = present(ts[len(covered.xs) :])
        if not of_variables:
            return pushed
        return unknown.unless_moving(_OF_VARIABLES.format(self._name), pushed, of_variables, inputs)

    def _of_point(self, of_inputs: Sequence[T]) -> Sequence[T]:
        return of_inputs[: len(self._covered.xs)]

    def _value_and_rule(self, call: calls.Call) -> tuple[Structure, Function]:
        """The value, as tensors, and the rule that the function returns for the arguments."""
        f = self._form.function.f
        y, grad_fn = vjp_protocol.value_and_rule(f, call(self._converted(f)), "grad_fn")

        def tensor(leaf: TensorLike | None) -> Tensor | None:
            if leaf is None or isinstance(leaf, tf.RaggedTensor):
                return leaf
            return structures.to_tensor(leaf, f"the result of {self._name}", beside=call.leaves)

        return structures.map_leaves(tensor, y), grad_fn

    def _check_variables(self) -> None:
        """Checks that the rule takes the variables, if there are any."""
        parameters = inspect.signature(self._grad_fn).parameters if self._variables else {}
        if not self._variables or "variables" in parameters:
            return
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise TypeError(
                f"{self._name} reads the variables {[v.name for v in self._variables]}, so its "
                "grad_fn must take a keyword argument `variables` and return (gradients, "
                "variable_gradients). Alternatively, pass the variables as arguments."
            )

    def _gradients(
        self,
        grad_fn: Function,
        y: Structure,
        upstream: Sequence[Tensor | None],
        inputs: Sequence[Tensor],
    ) -> list[Gradient]:
        """The gradients of the inputs, from those of the leaves of the value `y`."""
        leaves = tf.nest.flatten(y)
        us = list(map(with_numbers, leaves, spread(upstream, leaves)))
        name, names = f"grad_fn of {self._name}", [v.name for v in self._variables]
        of_variables: Sequence[Gradient] = []
        if self._variables:
            what = f"{name} takes variables, so it must return (gradients, variable_gradients)"
            returned, of_variables = pair_of(grad_fn(*us, variables=self._variables), what)
            of_variables = list(of_variables)
            if len(of_variables) != len(names):
                raise ValueError(
                    f"{name} returned {len(of_variables)} variable gradients, expected "
                    f"{len(names)}, one for each of {names}."
                )
        else:
            returned = grad_fn(*us)
        primals = [x for leaves in self._covered.by_leaf(self._covered.xs) for x in leaves]
        kept = vjp_protocol.gradients_of(self._arguments, primals, returned, name, _is_zero)
        kept += [*zip(of_variables, (f"variable {n}" for n in names), strict=True)]
        return [
            None if g is None else _checked(g, x, path, name)
            for (g, path), x in zip(kept, inputs, strict=True)
        ]


_OF_VARIABLES = (
    "{0} was differentiated in forward mode with respect to a variable that it reads, but its JVP "
    "rule only gives the derivatives with respect to its arguments. Pass the variable as an "
    "argument."
)


def _is_input(leaf: object) -> bool:
    """Whether a gradient with respect to this argument may be requested."""
    return structures.may_be_recorded(numbers_of(leaf))


def _besides(variables: Sequence[Variable], passed: Sequence[Any]) -> list[Variable]:
    """The variables that were not passed. Keras layers wrap variables, and cast what they read."""
    handles = [structures.handle_of(a) for a in passed]
    known = {id(t) for t in (*passed, *handles) if t is not None}
    return [v for v in variables if id(v) not in known and id(structures.handle_of(v)) not in known]


def _is_zero(gradient: Any, leaf: Any) -> bool:
    """Whether this is known to be zeros in the shape of an argument of integers, as JAX has it."""
    dtype = getattr(leaf, "dtype", None)
    if not (type(leaf) in (bool, int) if dtype is None else tf.as_dtype(dtype) != tf.string):
        return False
    came, expected = (tf.TensorShape(getattr(t, "shape", ())) for t in (gradient, leaf))
    if not came.is_compatible_with(expected):
        return False
    if isinstance(gradient, np.ndarray) and gradient.dtype.names == ("float0",):
        return True
    if not isinstance(gradient, tf.Tensor):
        return isinstance(gradient, (int, float, np.ndarray, np.generic)) and not np.any(gradient)
    value = tf.get_static_value(graphs.outside(gradient))
    if value is None and gradient.op.type == "Fill":
        value = tf.get_static_value(gradient.op.inputs[1])
    return gradient.op.type == "ZerosLike" if value is None else not np.any(value)


def _checked(gradient: TensorLike, x: Tensor, path: str, rule: str) -> Gradient:
    """A gradient in the dtype of its argument or variable `x`."""
    gradient = numbers_of(gradient)
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    dtype, what = x.dtype.name, f"the gradient of {path} that {rule} returned"
    values = TENSORFLOW.to_dtype(values, dtype, what, f"{path} is {dtype}", masks=True)
    found = with_values(gradient, values)
    shape, expected = structures.static_shape(found), structures.static_shape(x)
    vjp_protocol.check_shape(shape, expected, path, rule)
    if shapes.is_known(shape, expected):
        return found
    rows = 1 if found is not values else 0  # of a table, any number
    fits = structures.equal_shapes(tf.shape(values)[rows:], tf.shape(x)[rows:])
    message = f"{rule} returned a gradient for {path} of shape"
    return with_values(found, structures.checked(fits, values, message, "expected", x))
