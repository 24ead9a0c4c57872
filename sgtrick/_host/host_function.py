"""A host engine as a function of tensors."""

import copy
import functools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import tensorflow as tf

from sgtrick._core import calls, embedding, structures
from sgtrick._core._tensorflow.autograph import unconverted
from sgtrick._core._tensorflow.graphs import here
from sgtrick._core.hessian import symmetric
from sgtrick._core.types import Args, DTypeLike, Kwargs, Structure, Tensor
from sgtrick._host import foreign
from sgtrick._host.arguments import broadcast_batches, padded, tensors_of, with_event_ndims
from sgtrick._host.contract import CallSpec
from sgtrick._host.engine import Engine
from sgtrick._host.host_call import HostCall


class Derivatives(NamedTuple):
    """A function of arrays and its derivatives; None for those that are not given."""

    fn: Any  # a class or static method cannot be called, so it is no Function
    grad: Any = None
    hessp: Any = None
    hess: Any = None

    def of(self, instance: object, owner: type | None) -> "Derivatives":
        """The functions bound to `instance`; for class methods, `instance` is `owner`."""

        def bind(f: Any) -> Any:
            # Ask the type: a bound method instance exposes the __get__ of its function. Python
            # 3.13 warns that partials will become methods; here they remain what they are.
            binds = hasattr(type(f), "__get__") and not isinstance(f, functools.partial)
            return f.__get__(instance, owner) if binds else f

        return Derivatives(*map(bind, self))


class Options(NamedTuple):
    """How to call the engine: the arguments of `from_numpy` with these names."""

    vectorized: bool
    dtype: DTypeLike
    executor: Executor | None
    on_error: str | float
    event_ndims: int | Structure
    has_aux: bool
    name: str | None
    broadcasts: bool = False  # see Engine


class HostFunction:
    """A function whose value and gradient are computed outside TensorFlow; made by `from_numpy`."""

    def __init__(
        self,
        functions: Derivatives,
        options: Options,
        make: Callable[[Derivatives], Derivatives] = lambda functions: functions,
        bound_to: tuple[object, str] | None = None,
    ) -> None:
        """See `from_numpy`.

        `make` turns the caller's functions into functions of arrays. `bound_to` is for methods: the
        object, and the name of the attribute in its class.
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
        self._callee = calls.Callee(fn)
        self._callee.form = self
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
        """Stores the class and the attribute to which the function was assigned."""
        self._attribute, self._owner = name, owner

    def __get__(self, instance: object, owner: type | None = None) -> "HostFunction":
        """The function as a method of `instance`, always the same one, with its own counters."""
        of_class = isinstance(self._functions.fn, classmethod)
        if of_class:
            instance = owner
        if instance is None or not self._is_method:
            return self
        cache: dict[Any, Any]
        key: Any
        if isinstance(instance, type):
            cache, key = self._of_classes, instance
        else:  # kept in the object, to live as long as it does; objects with slots keep nothing
            cache = getattr(instance, "__dict__", {})
            key = f"_sgtrick_{self._owner.__qualname__}.{self._attribute}"
        found: HostFunction | None = cache.get(key)
        # A copied object also has the cache of the original, bound to the original.
        if found is None or found._bound_to is None or found._bound_to[0] is not instance:
            functions = self._functions.of(instance, owner)
            if functions.fn is self._functions.fn:
                return self  # a callable that is not a descriptor does not become a method
            bound_to = instance, self._attribute
            found = cache[key] = HostFunction(functions, self._options, self._make, bound_to)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostFunction":
        """A copy with a copied engine and its own counters; the executor is shared."""
        if self._bound_to is not None:
            instance, attribute = self._bound_to
            return getattr(copy.deepcopy(instance, memo), attribute)  # type: ignore[no-any-return]
        functions = Derivatives(*copy.deepcopy(tuple(self._functions), memo))
        return HostFunction(functions, self._options, self._make)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Args | str:
        """Methods are pickled by name, like Python's, so that objects holding them pickle too."""
        if self._bound_to is not None:
            return getattr, self._bound_to
        return super().__reduce_ex__(protocol)

    @property
    def calls(self) -> int:
        """Number of calls of the engine, one for each batch member, or one in all if vectorized."""
        return int(self._counted("calls"))

    @property
    def hess_calls(self) -> int:
        """Number of calls of `hessp` or `hess`."""
        return int(self._counted("hess_calls"))

    @property
    def failures(self) -> int:
        """Number of calls that raised an exception.

        If a vectorized engine raised and was called again with batches of one, each member for
        which it raised counts.
        """
        return int(self._counted("failures"))

    @property
    def nonfinite(self) -> int:
        """Number of points at which the value or the gradient was not finite.

        Failures and unknown gradients are not counted.
        """
        return int(self._counted("nonfinite"))

    @property
    def seconds(self) -> float:
        """Total wall time of all evaluations in seconds, including waiting for an executor."""
        return self._counted("seconds")

    def _counted(self, name: str) -> float:
        # Since Python 3.13, what a classmethod returns has the counters of the function in it.
        engines = [f._engine for f in (self, *self._of_classes.values())]
        return float(sum(getattr(engine, name) for engine in engines))

    def __repr__(self) -> str:
        """The name, the options that differ from their defaults, and the counters."""
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

    def __call__(self, *args: Structure, **kwargs: Structure) -> Structure:
        """The value with the gradient that the engine returned, or `(value, aux)`."""
        # AutoGraph rewrites the __call__ of an object even if it is told not to.
        return self._evaluate(args, kwargs)

    @unconverted
    def _evaluate(self, args: Args, kwargs: Kwargs) -> Structure:
        if self._callee.own(args):  # a method called on its class, or under a classmethod
            method = self.__get__(args[0], type(args[0]))
            if method is not self:
                return method(*args[1:], **kwargs)
        args, names = self._arguments(args, kwargs)
        for name, argument in zip(names, args, strict=True):
            foreign.refuse_tensors(self._name, name, argument)
        # Scopes must begin with an ASCII letter or digit; names may begin with "_" or be Greek.
        with tf.name_scope(re.sub(r"[^A-Za-z0-9_]", "", self._name).lstrip("_") or "host"):
            call, xs, hosted, batch = self._prepared(args, names)
            # In a branch of tf.cond, gradients reach only tensors that belong to the branch.
            xs, hosted = list(map(here, xs)), list(map(here, hosted))
            spec = call.spec
            value, *gradients = call.evaluate(hosted)
            value.set_shape(batch)
            if not tf.executing_eagerly():
                value = tf.identity(value)  # on the caller's device; the call is on the CPU
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
            failures = gradients  # what is left, if the call tells them
            for failed in failures:
                failed.set_shape(batch)
            hessian: Structure = _NO_HESSIAN.format(self._name)
            points = [leaf.x for leaf in leaves]
            if self._engine.has_hessian:
                hessian = symmetric(self._name, call.hessian_times, [*hosted, *failures], points)
            y = embedding.embed_constant(self._name, value, leaves, hessian)
            if aux is None:
                return y
            return y, embedding.auxiliary(self._name, aux, points)

    def get_config(self) -> NoReturn:
        """Raises: Keras calls it when it stores a model, and could not load what it stored."""
        raise foreign.not_stored(self._name)

    def _prepared(
        self, args: Args, names: Sequence[str]
    ) -> tuple[HostCall, list[Tensor], list[Tensor], tf.TensorShape]:
        """The host call, the leaves as points and as sent to the host, and the batch shape.

        The points have the batch shape of the value. Leaves that all members share are sent to the
        host once, which broadcasts them itself.
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
        spec = CallSpec(
            self._name,
            args,
            paths,
            event_ndims,
            dtypes,
            value_dtype,
            aux_dtype,
            tells_failures=self._engine.tells_failures,
        )
        hosted = points if batch.rank is None else padded(xs, event_ndims, batch.rank)
        return HostCall(self._engine, spec), points, hosted, batch

    def _arguments(self, args: Args, kwargs: Kwargs) -> tuple[Args, list[str]]:
        """The arguments by position, and their names."""
        signature = self._signature
        if signature is None:
            if kwargs:
                raise TypeError(
                    f"{self._name} takes no keyword arguments, got {list(kwargs)}. Pass them by "
                    "position."
                )
            return args, [f"args[{i}]" for i in range(len(args))]
        bound = calls.bind(signature, args, kwargs, self._name)
        if bound.kwargs:  # defaults turn arguments after an omitted one into positional ones
            bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(
                f"{self._name} has keyword-only arguments {list(bound.kwargs)}, but engines are "
                "called by position. Make them positional, or bind them with functools.partial."
            )
        positional = [
            p.name
            for p in signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        names = [*positional, *(f"args[{i}]" for i in range(len(positional), len(bound.args)))]
        return bound.args, names[: len(bound.args)]

    def _by_argument(self, names: Sequence[str]) -> Sequence[Structure]:
        """`event_ndims`, one for each argument."""
        stated = self._event_ndims
        if not isinstance(stated, (tuple, list)):
            return [stated] * len(names)
        parameters = self._signature.parameters if self._signature else ()
        # Omitted arguments have defaults and are the last ones.
        left_out = len(names) < len(stated) <= len(parameters)
        if len(stated) != len(names) and not left_out:
            raise ValueError(
                f"event_ndims must be an int, or have one entry for each of the {len(names)} "
                f"arguments ({', '.join(names)}), got {stated}."
            )
        return stated[: len(names)]


_NO_HESSIAN = (
    "{0} was asked for a second derivative, but its engine gives only a value and a gradient. "
    "Pass hessp=, a function of (*arrays, v) that returns the Hessian times v, or hess=, a "
    "function of (*arrays) that returns the Hessian; from_jax and from_torch compute it themselves."
)
