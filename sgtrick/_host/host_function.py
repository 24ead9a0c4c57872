"""A host engine as a function of tensors."""

import copy
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from sgtrick._core import calls, embedding, structures
from sgtrick._core._tensorflow.graphs import here
from sgtrick._core.hessian import symmetric
from sgtrick._core.types import Args, Kwargs, Structure, Tensor
from sgtrick._host import foreign
from sgtrick._host.arguments import broadcast_batches, padded, tensors_of, with_event_ndims
from sgtrick._host.contract import CallSpec
from sgtrick._host.engine import Engine
from sgtrick._host.host_call import HostCall


class Derivatives(NamedTuple):
    """A function of arrays and what is known of its derivatives; None where there is nothing."""

    fn: Any
    grad: Any = None
    hessp: Any = None
    hess: Any = None

    def of(self, instance: Any, owner: Tensor) -> "Derivatives":
        """The same as methods of `instance`, which is `owner` itself for methods of a class."""
        # Of the type, for a method that is bound already has the __get__ of its function.
        bind = (f.__get__(instance, owner) if hasattr(type(f), "__get__") else f for f in self)
        return Derivatives(*bind)


class Options(NamedTuple):
    """How the engine is to be called: the arguments of `from_numpy` by these names."""

    vectorized: bool
    dtype: Any
    executor: Executor | None
    on_error: str | float
    event_ndims: int | Structure
    has_aux: bool
    name: str | None
    broadcasts: bool = False  # as of an Engine


class HostFunction:
    """A function whose value and gradient are computed outside TensorFlow; made by `from_numpy`."""

    def __init__(
        self,
        functions: Derivatives,
        options: Options,
        make: Callable[[Derivatives], Derivatives] = lambda functions: functions,
        bound_to: tuple[Any, str] | None = None,
    ) -> None:
        """See `from_numpy`.

        `make` makes functions of arrays of what the caller gave. `bound_to` is for methods: the
        object, and the name of the attribute of its class.
        """
        if isinstance(functions.fn, staticmethod):
            functions = functions._replace(fn=functions.fn.__func__)
            self._is_method = False
        else:
            self._is_method = bound_to is None
        self._functions, self._options, self._make = functions, options, make
        self._bound_to, self._of_classes = bound_to, dict[type, HostFunction]()
        fn = functions.fn.__func__ if isinstance(functions.fn, classmethod) else functions.fn
        calls.imitate(self, fn)
        self._attribute, self._owner = calls.name_of(fn), type(None)
        self._signature = calls.signature_of(fn)
        self._event_ndims, self._has_aux = options.event_ndims, options.has_aux
        self._name = options.name or calls.name_of(fn)
        made = make(functions._replace(fn=fn))
        self._engine = Engine(
            *(made.fn, made.grad),
            hessp=made.hessp,
            hess=made.hess,
            vectorized=options.vectorized,
            broadcasts=options.broadcasts,
            dtype=options.dtype,
            executor=options.executor,
            on_error=options.on_error,
        )

    def __set_name__(self, owner: type, name: str) -> None:
        """Learns of which attribute of which class this is the function."""
        self._attribute, self._owner = name, owner

    def __get__(self, instance: Any, owner: Any = None) -> "HostFunction":
        """The function as a method of `instance`, always the same one: it counts its own calls."""
        of_class = isinstance(self._functions.fn, classmethod)
        if of_class:
            instance = owner
        if instance is None or not self._is_method:
            return self
        cache: dict[Any, Any]
        key: Any
        if isinstance(instance, type):
            cache, key = self._of_classes, instance
        else:  # in the object itself, so that it lives as long; those with slots have no place
            cache = getattr(instance, "__dict__", {})
            key = f"_sgtrick_{self._owner.__qualname__}.{self._attribute}"
        found: HostFunction | None = cache.get(key)
        # A copy of an object has what was kept in the other.
        if found is None or found._bound_to is None or found._bound_to[0] is not instance:
            functions = self._functions.of(instance, owner)
            if functions.fn is self._functions.fn:
                return self  # callable, but no function that becomes a method
            bound_to = instance, self._attribute
            found = cache[key] = HostFunction(functions, self._options, self._make, bound_to)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostFunction":
        """A function with counters of its own, of a copy of the engine; the executor is shared."""
        if self._bound_to is not None:
            instance, attribute = self._bound_to
            return getattr(copy.deepcopy(instance, memo), attribute)  # type: ignore[no-any-return]
        functions = Derivatives(*copy.deepcopy(tuple(self._functions), memo))
        return HostFunction(functions, self._options, self._make)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Methods are pickled by their names, as Python's own: objects that hold them can be."""
        if self._bound_to is not None:
            return getattr, self._bound_to
        return super().__reduce_ex__(protocol)

    @property
    def calls(self) -> int:
        """How often the engine was called: for each member of a batch, or once if vectorized."""
        return self._engine.calls

    @property
    def hess_calls(self) -> int:
        """How often `hessp` or `hess` was called."""
        return self._engine.hess_calls

    @property
    def failures(self) -> int:
        """How many of the calls raised an exception.

        Where a vectorized engine was called again to find out for which members it raises, the
        members are counted.
        """
        return self._engine.failures

    @property
    def nonfinite(self) -> int:
        """For how many points the value or the gradient that came back was not finite.

        Neither failures nor gradients that are not known are counted.
        """
        return self._engine.nonfinite

    @property
    def seconds(self) -> float:
        """Wall time of all evaluations in seconds, waiting for an executor included."""
        return self._engine.seconds

    def __repr__(self) -> str:
        """The name, the options that differ from the usual ones, and the counts."""
        usual = Options(False, "float64", None, "raise", 1, False, None)
        stated = [
            f"{key}={value!r}"
            for key, value in self._options._asdict().items()
            if value is not getattr(usual, key) and value != getattr(usual, key)
        ]
        given = self._functions._asdict()
        stated += [key for key in ("grad", "hessp", "hess") if given[key] is not None]
        counts = (
            f"{self.calls} calls, {self.hess_calls} for second derivatives, {self.failures} "
            f"failures, {self.nonfinite} not finite, {self.seconds:.3g} s"
        )
        return f"<host engine {', '.join([self._name, *stated])}: {counts}>"

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value, with the gradient that the engine returned; with aux `(value, aux)`."""
        if args and isinstance(args[0], self._owner):  # a method called on its class
            method = self.__get__(args[0], type(args[0]))
            if method is not self:
                return method(*args[1:], **kwargs)
        args, names = self._arguments(args, kwargs)
        for name, argument in zip(names, args, strict=True):
            foreign.refuse_tensors(self._name, name, argument)
        # Scopes begin with an ASCII letter or digit, and names may begin with "_" or be Greek.
        with tf.name_scope(re.sub(r"[^A-Za-z0-9_]", "", self._name).lstrip("_") or "host"):
            call, xs, hosted, batch = self._prepared(args, names)
            # In a branch, gradients find what is of the branch, and nothing from around it.
            xs, hosted = list(map(here, xs)), list(map(here, hosted))
            spec = call.spec
            value, *gradients = call.evaluate(hosted)
            value.set_shape(batch)
            if not tf.executing_eagerly():
                value = tf.identity(value)  # on the device of the caller: the call is on the CPU
            aux = gradients.pop() if self._has_aux else None
            leaves = []
            for x, path, ndims, dtype in zip(
                xs, spec.paths, spec.event_ndims, spec.dtypes, strict=True
            ):
                if dtype is not None:
                    gx = gradients.pop(0)
                    gx.set_shape(x.shape)
                    batch_ndims = tf.rank(x) - ndims if batch.rank is None else batch.rank
                    leaves.append(structures.Leaf(path, x, gx, batch_ndims))
            hessian: Structure = _NO_HESSIAN.format(self._name)
            if self._engine.has_hessian:
                points = [leaf.x for leaf in leaves]
                hessian = symmetric(self._name, call.hessian_times, hosted, points)
            y = embedding.embed_constant(self._name, value, leaves, hessian)
        return (y, aux) if self._has_aux else y

    def get_config(self) -> NoReturn:
        """Called by Keras where it stores a model; it would store what it cannot load."""
        raise foreign.not_stored(self._name)

    def _prepared(
        self, args: Args, names: Sequence[str]
    ) -> tuple[HostCall, list[Any], list[Any], Any]:
        """What is called, the leaves as points and as the host gets them, and the batch shape.

        The points have the batch shape of the value. The host broadcasts by itself what members
        share, so it gets that once.
        """
        flat = [
            leaf
            for name, arg, ndims in zip(names, args, self._by_argument(names), strict=True)
            for leaf in with_event_ndims(name, arg, ndims)
        ]
        paths, event_ndims = [path for path, _, _ in flat], [ndims for _, _, ndims in flat]
        xs, dtypes, value_dtype = tensors_of(flat, self._engine.dtype)
        points, batch = broadcast_batches(xs, event_ndims, paths)
        aux_dtype = self._engine.dtype if self._has_aux else None
        spec = CallSpec(self._name, args, paths, event_ndims, dtypes, value_dtype, aux_dtype)
        hosted = points if batch.rank is None else padded(xs, event_ndims, batch.rank)
        return HostCall(self._engine, spec), points, hosted, batch

    def _arguments(self, args: Args, kwargs: Kwargs) -> tuple[tuple[Any, ...], list[str]]:
        """The arguments by position, and their names."""
        signature = self._signature
        if signature is None:
            if kwargs:
                raise TypeError(f"{self._name} takes no keywords, got {list(kwargs)}.")
            return args, [f"args[{i}]" for i in range(len(args))]
        bound = calls.bind(signature, args, kwargs, self._name)
        if bound.kwargs:  # also what comes after an argument that was left out
            bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(
                f"{self._name} has the keyword-only arguments {list(bound.kwargs)}. An engine is "
                "called by position: make them positional, or bind them by functools.partial."
            )
        positional = [
            p.name
            for p in signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        names = [*positional, *(f"args[{i}]" for i in range(len(positional), len(bound.args)))]
        return bound.args, names[: len(bound.args)]

    def _by_argument(self, names: Sequence[str]) -> Sequence[Any]:
        """`event_ndims`, one for each argument."""
        stated = self._event_ndims
        if not isinstance(stated, (tuple, list)):
            return [stated] * len(names)
        parameters = self._signature.parameters if self._signature else ()
        # What a call leaves out is at the end, and has a default.
        left_out = len(names) < len(stated) <= len(parameters)
        if len(stated) != len(names) and not left_out:
            raise ValueError(
                f"event_ndims={stated} must have one entry for each of the {len(names)} arguments "
                f"({', '.join(names)}), or be an int for all."
            )
        return stated[: len(names)]


_NO_HESSIAN = (
    "A second derivative of {0} was asked for, whose engine gives a value and a gradient. Pass "
    "hessp=, a function of (*arrays, v) that returns the Hessian times v, or hess=, a function of "
    "(*arrays) that returns the Hessian; from_jax and from_torch have both."
)
