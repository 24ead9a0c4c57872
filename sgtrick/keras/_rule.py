"""A call of a function that returns `(y, grad)`, as a function of flat lists of tensors."""

import inspect
import types
from collections.abc import Sequence
from typing import NamedTuple

import keras
from keras import ops

from sgtrick._arguments import calls, dtypes, structures, vjp_protocol
from sgtrick._host import reticulate
from sgtrick._types import Args, Function, Kwargs, Structure
from sgtrick.keras import _backends, _structures
from sgtrick.keras._symbolic import any_symbolic
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._types import Gradient, Pullback, Tensor, TensorLike


class FunctionRule:
    """The caller's function and arguments as a `Rule` of the tensors that have derivatives."""

    push = None

    def __init__(self, function: calls.Callee, args: Args, kwargs: Kwargs) -> None:
        call = function.bind(args, kwargs)
        own = 0 if args and ops.is_tensor(args[0]) else function.receivers(args)
        self._owner = call.values[:own]  # self of a method has no gradient
        self._arguments = vjp_protocol.arguments_of(function, call, own, function.defaulted(call))
        self.__name__, self._grad = function.name, f"grad of {function.name}"
        self.not_argument = _NOT_ARGUMENT.format(function.name)
        self.not_connected = _NOT_CONNECTED.format(function.name)
        self._f, self._keywords = function.f, call.keywords
        self._values, self._positional = call.values[own:], call.positional - own
        self._leaves = [_value_of(leaf) for a in self._arguments for leaf in a.leaves]
        self._primals = [leaf if _is_input(leaf) else None for leaf in self._leaves]
        self.inputs = [x for x in self._primals if x is not None]
        self._like: list[Structure] = []  # the structure of the value, set by the first call

    def __call__(self, *xs: Tensor) -> tuple[list[Tensor], Pullback]:
        """Returns the outputs at `xs`, and the pullback from them to `xs`."""
        if self._like:
            return self._at(xs)[:2]
        # State is changed in the first call alone; torch.compile forbids it in a derivative.
        with _Uses() as uses:
            outputs, pull, self._like = self._at(xs)
        uses.check_none(self.__name__)
        return outputs, pull

    def _at(self, xs: Sequence[Tensor]) -> tuple[list[Tensor], Pullback, list[Structure]]:
        some = iter(xs)
        leaves = [
            leaf if x is None else next(some)
            for leaf, x in zip(self._leaves, self._primals, strict=True)
        ]
        at, values = iter(leaves), []
        for value, argument in zip(self._values, self._arguments, strict=True):
            own = [next(at) for _ in argument.leaves]
            is_same = all(a is b for a, b in zip(own, argument.leaves, strict=True))
            values.append(value if is_same else _structures.pack(value, own))
        n = self._positional
        kwargs = dict(zip(self._keywords, values[n:], strict=True))
        returned = self._f(*self._owner, *values[:n], **kwargs)
        y, grad = vjp_protocol.value_and_rule(self._f, returned, "grad")
        if any_symbolic(y):
            raise TypeError(_SYMBOLIC.format(self.__name__))
        # y itself may be freed; what is None has no upstream gradient.
        marks = [None if leaf is None else True for leaf in _structures.leaves(y)]
        like = _structures.pack(y, marks)
        # What a pullback reads is looked for in its closure: nothing else may be there.
        arguments, primals, name = self._arguments, self._primals, self._grad
        grad = _of_leaves(grad, name, arguments, values, like)

        def pull(*us: Gradient) -> list[Gradient]:
            returned = grad(*structures.spread(us, marks))
            kept = vjp_protocol.gradients_of(arguments, primals, returned, name)
            inputs = [x for x in primals if x is not None]
            return [_checked(g, x, path, name) for (g, path), x in zip(kept, inputs, strict=True)]

        return self._outputs(y), pull, [like]

    def _outputs(self, y: Structure) -> list[Tensor]:
        def tensor(leaf: TensorLike) -> Tensor:
            if ops.is_tensor(leaf):  # left alone: on tensorflow they may be ragged or sparse
                return leaf
            dtype = dtypes.of_number(leaf, map(KERAS.dtype_of, self.inputs))
            return ops.convert_to_tensor(leaf, dtype)

        return [tensor(leaf) for leaf in _structures.leaves(y) if leaf is not None]

    def pack(self, outputs: list[Tensor]) -> Structure:
        """Packs `outputs` into the structure of the value."""
        like = self._like[0]
        return _structures.pack(like, structures.spread(outputs, _structures.leaves(like)))


def _checked(g: Gradient, x: Tensor, path: str, rule: str) -> Gradient:
    if g is None:
        return None
    dtype = KERAS.dtype_of(x)
    if not (ops.is_tensor(g) and KERAS.dtype_of(g) == dtype):
        what = f"the gradient of {path} that {rule} returned"
        g = KERAS.to_dtype(g, dtype, what, f"{path} is {dtype}", masks=True)
    vjp_protocol.check_shape(KERAS.shape_of(g), KERAS.shape_of(x), path, rule)
    return g


class _Uses(keras.StatelessScope):  # type: ignore[misc]
    """Records which variables are read and assigned, without changing them, and which losses."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True)
        self._read: list[keras.Variable] = []
        self._assigned: list[keras.Variable] = []

    def check_none(self, name: str) -> None:
        """Raises if variables or losses were used, because no rule gives their gradients."""
        if self._read:
            raise TypeError(
                f"{name} reads the variables {[v.path for v in self._read]}, which would get no "
                "gradient. Pass them as arguments, and return their gradients."
            )
        if self._assigned:
            raise TypeError(
                f"{name} assigns the variables {[v.path for v in self._assigned]}. Return the new "
                "values, and assign them outside the function."
            )
        if self.losses:
            raise TypeError(
                f"{name} adds a loss, by add_loss or a layer with an activity regularizer, which "
                "would get no gradient. Add it outside the function, from what this returns."
            )

    def get_current_value(self, variable: keras.Variable) -> Tensor:
        if variable.trainable and all(v is not variable for v in self._read):
            self._read.append(variable)
        return self.original_scope and self.original_scope.get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        self._assigned.append(update[0])


def _of_leaves(
    grad: Function,
    name: str,
    arguments: Sequence[vjp_protocol.Argument],
    args: Sequence[Structure],
    y: Structure,
) -> Function:
    """`grad` as a function of one upstream gradient for each leaf of `y`.

    Keras documents `grad(upstream)` for tensorflow and jax, `grad(*args, upstream)` for torch, and
    for all `grad(*args, upstream=None)`, which may also be called in the way of torch. Instead of
    the star there may be the names of the arguments. Parameters that have a default and another
    name than `upstream` keep their default.

    Args:
        grad: The function of the caller.
        name: Its name in errors.
        arguments: What is known of the arguments. Those that have their default may be missing.
        args: Their values.
        y: The structure of the value.
    """
    count = len(_structures.leaves(y))

    def in_one(us: Sequence[Gradient]) -> Structure:
        return us[0] if count == 1 else _structures.pack(y, us)

    def by_name(*us: Gradient) -> Structure:
        return grad(*values, upstream=in_one(us))

    def from_r(*us: Gradient) -> Structure:
        try:
            return grad(*us)
        except RuntimeError as error:  # reticulate does not tell the names of parameters
            missing = ("upstream", "is missing, with no default")
            if not any(reticulate.is_missing(what, error) for what in missing):
                raise
        return by_name(*us)

    signature, values = _signature(grad, count), list(args)
    if signature is None:
        return grad
    if signature.is_of_r:
        return from_r
    positional, required = signature.positional, signature.required
    if "upstream" in signature.keywords:
        return by_name
    if "upstream" in positional:
        own = positional[: positional.index("upstream")]
        if set(required) <= {*own, "upstream"}:
            if not own:
                return lambda *us: grad(in_one(us))
            for needed in (arguments, [a for a in arguments if not a.is_default]):
                if own == [a.name for a in needed]:
                    values = [v for a, v in zip(arguments, args, strict=True) if a.name in own]
                    return by_name
    more = count - len(required)
    if more == 0 or (more > 0 and signature.has_star and positional == required):
        return grad
    message = (
        f"{name} takes ({', '.join(required)}) besides parameters with defaults, but there are "
        f"{count} upstream gradients, one for each leaf of y. It may take these; or all of them as "
        "`upstream`; or the arguments, as `*args` or under their own names, and then `upstream`: "
        f"({', '.join([*(a.name for a in arguments), 'upstream'])})."
    )

    def misfit(*_: Gradient) -> Structure:
        raise TypeError(message)

    return misfit


class _Signature(NamedTuple):
    """The names of parameters: of all by position, those without default, and by keyword alone."""

    positional: list[str]
    required: list[str]
    keywords: list[str]
    has_star: bool
    is_of_r: bool = False


def _signature(f: Function, count: int) -> _Signature | None:
    """The signature of `f`, which may get `count` upstream gradients; None if it is unknown."""
    if _backends.is_compiling():
        return _signature_in_code(f, count)
    signature = calls.signature_of(f)
    if signature is None:
        return None
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return _Signature(
        [p.name for p in positional],
        [p.name for p in positional if p.default is p.empty],
        [p.name for p in parameters if p.kind is p.KEYWORD_ONLY],
        any(p.kind is p.VAR_POSITIONAL for p in parameters),
        reticulate.is_r_function(f),
    )


def _signature_in_code(f: Function, count: int) -> _Signature | None:
    """The signature as far as torch.compile can trace it, which is not the defaults.

    So of the parameters by position, as many as there may be upstream gradients have none.
    """
    if not isinstance(f, types.FunctionType) or f.__code__.co_flags & inspect.CO_VARKEYWORDS:
        return None
    code = f.__code__
    positional, rest = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount :]
    return _Signature(
        list(positional),
        list(positional[:count]),
        list(rest[: code.co_kwonlyargcount]),
        bool(code.co_flags & inspect.CO_VARARGS),
    )


def _value_of(leaf: TensorLike) -> TensorLike:
    # On tensorflow, keras.Variable.value is a variable, which may be assigned before grad runs.
    return ops.convert_to_tensor(leaf) if hasattr(leaf, "assign") else leaf


def _is_input(leaf: TensorLike) -> bool:
    return ops.is_tensor(leaf) and dtypes.is_differentiable(KERAS.dtype_of(leaf))


_SYMBOLIC = (
    "{0} closes over a symbolic tensor, which has no value when the function is called. Pass it as "
    "an argument."
)
_NOT_ARGUMENT = (
    "{0} reads a tensor that is being differentiated but is not among its arguments, so its "
    "gradient is unknown. Pass it itself, not an object that holds it, as an argument, or apply "
    "keras.ops.stop_gradient to it before the call."
)
_NOT_CONNECTED = (
    "The gradient of {0} was differentiated again, but is not connected to the arguments: it is a "
    "constant, or keras.ops.stop_gradient or NumPy has cut it off. If it really is a constant, add "
    "0 * x to it. Otherwise compute it from the arguments themselves."
)
