"""A call of a function that returns `(y, grad)`, as a function of flat lists of tensors."""

import inspect
import types
from collections.abc import Sequence

import keras
from keras import ops

from sgtrick._arguments import calls, dtypes, vjp_protocol
from sgtrick._host import reticulate
from sgtrick._types import Args, Function, Kwargs, Structure
from sgtrick.keras import _backends, _structures
from sgtrick.keras._tensors import KERAS
from sgtrick.keras._types import Gradient, Pullback, Tensor, TensorLike


class FunctionRule:
    """The caller's function and arguments as a `Rule` of the tensors that have derivatives."""

    push = None

    def __init__(self, function: calls.Callee, args: Args, kwargs: Kwargs) -> None:
        call = function.bind(args, kwargs)
        own = 0 if args and ops.is_tensor(args[0]) else function.receivers(args)
        self._owner = call.values[:own]  # self of a method has no gradient
        positional = tuple(call.values[own : call.positional])
        self._arguments = vjp_protocol.arguments_of(function, call, own, function.defaulted(call))
        self.__name__, self._grad = function.name, f"grad of {function.name}"
        self.not_argument = _NOT_ARGUMENT.format(function.name)
        self.not_connected = _NOT_CONNECTED.format(function.name)
        self._f, self._keywords = function.f, call.keywords
        self._call = (positional, list(call.values[call.positional :]))
        self._leaves = [_value_of(leaf) for a in self._arguments for leaf in a.leaves]
        self._primals = [leaf if _is_input(leaf) else None for leaf in self._leaves]
        self.inputs = [x for x in self._primals if x is not None]
        self._y: Structure = None  # the structure of the value, set by the first call

    def __call__(self, *xs: Tensor) -> tuple[list[Tensor], Pullback]:
        """Returns the outputs at `xs`, and the pullback from them to `xs`."""
        if self._y is not None:
            y, pull = self._at(xs)
            return self._outputs(y), pull
        # State is changed in the first call alone; torch.compile forbids it in a derivative.
        with _Uses() as uses:
            self._y, pull = self._at(xs)
        uses.check_none(self.__name__)
        return self._outputs(self._y), pull

    def _at(self, xs: Sequence[Tensor]) -> tuple[Structure, Pullback]:
        some = iter(xs)
        leaves = [
            leaf if x is None else next(some)
            for leaf, x in zip(self._leaves, self._primals, strict=True)
        ]
        args, values = _structures.pack(self._call, leaves)
        kwargs = dict(zip(self._keywords, values, strict=True))
        returned = self._f(*self._owner, *args, **kwargs)
        y, grad = vjp_protocol.value_and_rule(self._f, returned, "grad")
        grad = _of_leaves(grad, [*args, *values], y)

        def pull(*us: Gradient) -> list[Gradient]:
            returned = grad(*us)
            kept = vjp_protocol.gradients_of(self._arguments, self._primals, returned, self._grad)
            return [
                self._checked(g, x, path) for (g, path), x in zip(kept, self.inputs, strict=True)
            ]

        return y, pull

    def _outputs(self, y: Structure) -> list[Tensor]:
        def tensor(leaf: TensorLike) -> Tensor:
            if ops.is_tensor(leaf):  # left alone: on tensorflow they may be ragged or sparse
                return leaf
            dtype = dtypes.of_number(leaf, map(KERAS.dtype_of, self.inputs))
            return ops.convert_to_tensor(leaf, dtype)

        return list(map(tensor, _structures.leaves(y)))

    def pack(self, outputs: list[Tensor]) -> Structure:
        """Packs `outputs` into the structure of the value."""
        return _structures.pack(self._y, outputs)

    def _checked(self, g: Gradient, x: Tensor, path: str) -> Gradient:
        if g is None:
            return None
        dtype = KERAS.dtype_of(x)
        if not (ops.is_tensor(g) and KERAS.dtype_of(g) == dtype):
            what = f"the gradient of {path} that {self._grad} returned"
            g = KERAS.to_dtype(g, dtype, what, f"{path} is {dtype}", masks=True)
        vjp_protocol.check_shape(KERAS.shape_of(g), KERAS.shape_of(x), path, self._grad)
        return g


class _Uses(keras.StatelessScope):  # type: ignore[misc]
    """Records which variables are read and assigned, without changing them."""

    def __init__(self) -> None:
        super().__init__()
        self._read: list[keras.Variable] = []
        self._assigned: list[keras.Variable] = []

    def check_none(self, name: str) -> None:
        """Raises if variables were used, because no rule gives their gradients."""
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

    def get_current_value(self, variable: keras.Variable) -> Tensor:
        if variable.trainable and all(v is not variable for v in self._read):
            self._read.append(variable)
        return self.original_scope and self.original_scope.get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        self._assigned.append(update[0])


def _of_leaves(grad: Function, args: Sequence[Structure], y: Structure) -> Function:
    """`grad` as a function of one upstream gradient for each leaf of `y`.

    Keras documents `grad(upstream)` for tensorflow and jax, `grad(*args, upstream)` for torch, and
    for all `grad(*args, upstream=None)`, which may also be called in the way of torch.
    """
    positional, keywords = _parameters(grad)

    def in_one(us: Sequence[Gradient]) -> Structure:
        return us[0] if len(us) == 1 else _structures.pack(y, us)

    def by_name(*us: Gradient) -> Structure:
        return grad(*args, upstream=in_one(us))

    def from_r(*us: Gradient) -> Structure:
        try:
            return grad(*us)
        except RuntimeError as error:  # reticulate does not tell the names of parameters
            if not reticulate.is_missing("upstream", error):
                raise
        return by_name(*us)

    if "upstream" in keywords:
        return by_name
    if [*positional] == ["upstream"]:
        return lambda *us: grad(in_one(us))
    # torch.compile cannot trace the second question, but for it the first is never true.
    if [*positional] == ["args", "kwargs"] and reticulate.is_r_function(grad):
        return from_r
    return grad


def _parameters(f: Function) -> tuple[Sequence[str], Sequence[str]]:
    """The names of the positional parameters, and of those that are passed by keyword alone."""
    if isinstance(f, types.FunctionType) and not f.__code__.co_flags & inspect.CO_VARKEYWORDS:
        # What torch.compile can trace, unlike inspect.signature.
        names, count = f.__code__.co_varnames, f.__code__.co_argcount
        return names[:count], names[count : count + f.__code__.co_kwonlyargcount]
    signature = None if _backends.is_compiling() else calls.signature_of(f)
    found = [*signature.parameters.values()] if signature else []
    keywords = [p.name for p in found if p.kind is p.KEYWORD_ONLY]
    return [p.name for p in found if p.name not in keywords], keywords


def _value_of(leaf: TensorLike) -> TensorLike:
    # On tensorflow, keras.Variable.value is a variable, which may be assigned before grad runs.
    return ops.convert_to_tensor(leaf) if hasattr(leaf, "assign") else leaf


def _is_input(leaf: TensorLike) -> bool:
    return ops.is_tensor(leaf) and dtypes.is_differentiable(KERAS.dtype_of(leaf))


_NOT_ARGUMENT = (
    "{0} reads a tensor that is being differentiated but is not among its arguments, so its "
    "gradient is unknown. Pass it itself, not an object that holds it, as an argument, or apply "
    "keras.ops.stop_gradient to it."
)
_NOT_CONNECTED = (
    "The gradient of {0} was differentiated again, but is not connected to the arguments: it is a "
    "constant, or keras.ops.stop_gradient or NumPy has cut it off. If it really is a constant, add "
    "0 * x to it. Otherwise compute it from the arguments themselves."
)
