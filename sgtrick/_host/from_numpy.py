"""Host engines: functions of NumPy arrays with their gradients, as functions of tensors."""

import copy
import functools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from sgtrick._core import calls, embedding, shapes, structures
from sgtrick._core._tensorflow.graphs import here
from sgtrick._core.hessian import symmetric
from sgtrick._core.types import Args, DTypeLike, Function, Kwargs, Structure, Tensor
from sgtrick._host import foreign
from sgtrick._host.engine import Engine
from sgtrick._host.host_call import HostCall
from sgtrick._host.replies import CallSpec, too_few_dimensions


def from_numpy(
    fn: Function | None = None,
    *,
    grad: Function | None = None,
    hessp: Function | None = None,
    hess: Function | None = None,
    event_ndims: Structure = 1,
    vectorized: bool = False,
    has_aux: bool = False,
    dtype: DTypeLike = "float64",
    executor: Executor | None = None,
    on_error: str | float = "raise",
    name: str | None = None,
) -> Any:
    """Brings a function of NumPy arrays and its gradient into TensorFlow.

    For log densities, losses and simulators that live outside TensorFlow: solvers, Stan, compiled
    code. The result takes tensors and has the gradient that the engine returned, under every
    transformation in which TensorFlow can call the host at all. One call of the engine gives both.

        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import sgtrick
        >>> @sgtrick.from_numpy
        ... def log_prob(x):  # an array [2] of float64
        ...     return -0.5 * np.sum(x**2), -x
        >>> chains = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(chains)
        ...     y = log_prob(chains)
        >>> y.numpy()
        array([ -2.5, -12.5, -30.5], dtype=float32)
        >>> tape.gradient(y, chains).numpy()
        array([[-1., -2.],
               [-3., -4.],
               [-5., -6.]], dtype=float32)
        >>> log_prob.calls
        3

    Args:
        fn: The engine, `fn(*arrays) -> (value, gradient)`. It gets writable copies, which it may
            change and keep. Floating arguments come as arrays of `dtype`, others in their own.
            `value` is one number; `gradient` has the shape and structure of the argument, for
            several arguments it is a tuple with one for each. Arguments that have no derivatives
            (int, bool, string) have None there. None for a floating argument means that its
            gradient is not known: NaN, for whoever asks for it. Masked entries count as NaN.
            Without `fn`, `from_numpy` returns a decorator: `@sgtrick.from_numpy(event_ndims=0)`.
            Functions in a class are methods there.
        grad: The gradient, as a function of its own with the same arguments; `fn` then returns the
            value alone. Both are called in each evaluation, whether or not the gradient is used.
        hessp: For second derivatives, `hessp(*arrays, v)`, which returns the Hessian times `v`.
            For one argument `v` and the product have its shape and structure, for several they are
            tuples, with None for those that have no derivatives. It is called only when a second
            derivative is asked for. A method, where `fn` is one; so are `grad` and `hess`.
        hess: In its place, `hess(*arrays)`, which returns the Hessian as `jax.hessian` does: for
            one array of shape `E` an array `E + E`, for structures and several arguments a
            structure of structures. None stands for a block that is not known.
        event_ndims: How many trailing dimensions of an argument belong to one call of the engine:
            an int for all, or a tuple with one for each argument, which is an int or, for an
            argument that is a structure, a structure of ints. All dimensions before are batch. The
            batch shapes of the arguments are broadcast against each other.
        vectorized: Whether the engine takes all members of a batch in one call: arguments
            `[batch..., event...]`, a value `[batch...]`, and gradients like the arguments. An
            argument that members share is a view that takes no memory and cannot be written to.
            Without, the engine is called for one member after the other.
        has_aux: Whether the engine returns `((value, aux), gradient)`, or with `grad` `(value,
            aux)`. `aux` is an array of real numbers, of the same shape for all members of a batch;
            where all of a batch failed, one NaN for each.
        dtype: The floating dtype in which the engine computes.
        executor: A `concurrent.futures.Executor` that evaluates the members of a batch at once:
            threads, processes, or `dask.distributed`'s `Client.get_executor()`. Draws do not
            depend on it. Processes and clusters need an engine that can be pickled.
        on_error: `"raise"`, or a number which is the value, with zero gradient, wherever the engine
            raises an exception. `-np.inf` makes a sampler reject. Where a vectorized engine raises,
            it is called again with batches of one, to find out for which members. Where `hessp` or
            `hess` raises, second derivatives are NaN. A reply of a wrong form, and the loss of an
            executor, always raise.
        name: Prefix of the ops, and what errors call the engine; by default its own name.

    Returns:
        A function of tensors, arrays or numbers, or structures of them, that returns the value as a
        tensor `[batch...]`, or `(value, aux)` with `aux` of `dtype`, `[batch..., ...]`. Value and
        gradients have the dtype of their arguments, the value the widest of these. Static shapes
        are those of the arguments. It counts: `calls` of the engine, `hess_calls` of `hessp` or
        `hess`, `failures`, calls that raised; `nonfinite`, points whose value or gradient was not
        finite; and `seconds`, the wall time of all.

        Without an executor, one call is made at a time, from whichever threads TensorFlow calls;
        the counters are exact. No call is made for an empty batch. What `tf.vectorized_map` maps
        over is batch, too.

    Raises:
        TypeError: An argument that cannot be converted or is complex, a `dtype` that is not
            floating, an executor that is none, an engine that cannot be sent to it, both of `hessp`
            and `hess`, or (when called) a reply without a gradient or of something other than real
            numbers.
        ValueError: Shapes that do not broadcast, wrong `event_ndims` or `on_error`, or (when
            called) a reply of a wrong shape or structure. In graphs what is raised when called
            arrives as a `tf.errors.OpError` with the same message.
        RuntimeError: The engine raised: its own message, and the arguments; or no answer came from
            the executor.
        NotImplementedError: While tracing for XLA, `jit_compile=True`, which cannot call the host.
        AssertionError: From `tf.saved_model.save`, for a function that calls the engine.
        LookupError: When a second derivative is taken without `hessp` or `hess`, of the result or
            of anything made of it, or a third one. In a `tf.function` this is a
            `tf.errors.InvalidArgumentError` when it is run; around it the derivative is NaN.
    """
    options = Options(
        vectorized=vectorized, dtype=dtype, executor=executor, on_error=on_error,
        event_ndims=event_ndims, has_aux=has_aux, name=name,
    )  # fmt: skip
    if fn is None:
        return lambda fn: HostFunction(Derivatives(fn, grad, hessp, hess), options)
    return HostFunction(Derivatives(fn, grad, hessp, hess), options)


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
    event_ndims: Structure
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
            for leaf in _with_event_ndims(name, arg, ndims)
        ]
        paths, event_ndims = [path for path, _, _ in flat], [ndims for _, _, ndims in flat]
        xs, dtypes, value_dtype = _tensors(flat, self._engine.dtype)
        points, batch = _broadcast(xs, event_ndims, paths)
        aux_dtype = self._engine.dtype if self._has_aux else None
        spec = CallSpec(self._name, args, paths, event_ndims, dtypes, value_dtype, aux_dtype)
        hosted = points if batch.rank is None else _padded(xs, event_ndims, batch.rank)
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


def _with_event_ndims(name: str, arg: Any, ndims: Any) -> list[tuple[str, Any, int]]:
    """`(path, leaf, event_ndims)` for every leaf of an argument."""
    if not tf.nest.is_nested(ndims):
        flat = [(path, leaf, ndims) for path, leaf in structures.flatten(arg)]
    else:
        flat = structures.pair(arg, ndims, name, f"the event_ndims of {name}")
    for path, _, n in flat:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 0:
            raise ValueError(
                f"event_ndims must be an int of at least 0, or one for each argument, got {n!r} "
                f"for {name}{path}."
            )
    return [(name + path, leaf, n) for path, leaf, n in flat]


def _tensors(
    flat: Sequence[tuple[str, Any, int]], default: Any
) -> tuple[list[Any], list[Any], Any]:
    """The leaves as tensors, the dtypes of their gradients, and that of the value."""
    # Variables may say another dtype than that in which a layer of Keras reads them.
    read = [
        None if type(leaf) is float else structures.to_tensor(leaf, path) for path, leaf, _ in flat
    ]
    # A number has no dtype of its own: it takes that of the others, or of the engine.
    floating = [x.dtype for x in read if x is not None and x.dtype.is_floating]
    common = _widest(floating) if floating else default
    xs, dtypes = [], []
    for (path, leaf, ndims), x in zip(flat, read, strict=True):
        if x is None:
            x = structures.to_tensor(leaf, path, dtype=common)
        if x.dtype.is_complex:
            raise TypeError(
                f"{path} is complex ({x.dtype.name}), and an engine takes real arrays. Pass its "
                "real and its imaginary part as two arguments."
            )
        shape = structures.static_shape(x)
        if shape is not None and len(shape) < ndims:
            raise too_few_dimensions(path, shape, ndims)
        xs.append(x)
        dtypes.append(x.dtype.as_numpy_dtype if x.dtype.is_floating else None)
    return xs, dtypes, common


def _widest(dtypes: Sequence[Any]) -> Any:
    """The dtype that holds all: of float16 and bfloat16, neither does."""
    size = max(dtype.size for dtype in dtypes)
    widest = {dtype for dtype in dtypes if dtype.size == size}
    return (widest.pop() if len(widest) == 1 else tf.float32).as_numpy_dtype


def _broadcast(
    xs: Sequence[Tensor], event_ndims: Sequence[int], paths: Sequence[str]
) -> tuple[list[Any], Any]:
    """The tensors with a common batch shape, and what is known of it.

    Autodiff of the broadcast sums the gradients of what is repeated.
    """
    if not xs:
        return [], tf.TensorShape([])
    batches = [_front(x, n) for x, n in zip(xs, event_ndims, strict=True)]
    try:
        batch = functools.reduce(tf.broadcast_static_shape, batches)
    except ValueError as error:
        shown = ", ".join(
            f"{p} {shapes.show(structures.static_shape(x))}" for p, x in zip(paths, xs, strict=True)
        )
        raise ValueError(
            f"The batch shapes of {shown} do not broadcast, with event_ndims={list(event_ndims)}. "
            "What is before the event dimensions is batch."
        ) from error
    if len(xs) == 1 or all(b.is_fully_defined() and b == batch for b in batches):
        return list(xs), batch
    shape = batch.as_list() if batch.is_fully_defined() else None
    if shape is None:
        xs = [_with_event(x, n, path) for x, n, path in zip(xs, event_ndims, paths, strict=True)]
        shape = functools.reduce(
            tf.broadcast_dynamic_shape,
            [tf.shape(x)[: tf.rank(x) - n] for x, n in zip(xs, event_ndims, strict=True)],
        )
    out = []
    for x, n in zip(xs, event_ndims, strict=True):
        y = tf.broadcast_to(x, tf.concat([shape, tf.shape(x)[tf.rank(x) - n :]], 0))
        known = x.shape.rank is not None
        y.set_shape(batch.concatenate(x.shape[x.shape.rank - n :] if known else [None] * n))
        out.append(y)
    return out, batch


def _padded(xs: Sequence[Tensor], event_ndims: Sequence[int], batch_ndims: int) -> list[Any]:
    """The tensors with that many batch dimensions, those that lack being of size 1."""
    padded = []
    for x, n in zip(xs, event_ndims, strict=True):
        lacking = batch_ndims + n - x.shape.rank
        padded.append(x[(tf.newaxis,) * lacking + (...,)] if lacking else x)
    return padded


def _with_event(x: Tensor, event_ndims: int, path: str) -> Tensor:
    """Returns `x`, checked to have at least these dimensions: in graphs when they are run."""
    if x.shape.rank is not None:
        return x
    message = f"event_ndims={event_ndims}, but {path} has fewer dimensions:"
    return structures.checked(tf.rank(x) >= event_ndims, x, message)


def _front(x: Tensor, event_ndims: int) -> Any:
    """The static batch shape."""
    return x.shape if x.shape.rank is None else x.shape[: x.shape.rank - event_ndims]
