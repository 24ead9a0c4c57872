"""Host engines: functions of NumPy arrays with their gradients, as functions of tensors."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # the only place that knows of XLA

from sgtrick import _arguments, _foreign, _leaves, _shapes
from sgtrick._core import embedding
from sgtrick._engine import Engine
from sgtrick._replies import Layout, too_few_dimensions


def from_numpy(
    fn: Callable[..., Any],
    *,
    grad: Callable[..., Any] | None = None,
    event_ndims: Any = 1,
    vectorized: bool = False,
    has_aux: bool = False,
    dtype: Any = "float64",
    executor: Any = None,
    on_error: Any = "raise",
    name: str | None = None,
) -> "HostFunction":
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
            gradient is not known: NaN, for whoever asks for it.
        grad: The gradient, as a function of its own with the same arguments; `fn` then returns the
            value alone. Both are called in each evaluation, whether or not the gradient is used.
        event_ndims: How many trailing dimensions of an argument belong to one call of the engine:
            an int for all, or a tuple with one for each argument, which is an int or, for an
            argument that is a structure, a structure of ints. All dimensions before are batch. The
            batch shapes of the arguments are broadcast against each other.
        vectorized: Whether the engine takes all members of a batch in one call: arguments
            `[batch..., event...]`, a value `[batch...]`, and gradients like the arguments. Without,
            it is called for one member after the other.
        has_aux: Whether the engine returns `((value, aux), gradient)`, or with `grad` `(value,
            aux)`. `aux` is an array of real numbers, of the same shape for all members of a batch;
            where all of a batch failed, one NaN for each.
        dtype: The floating dtype in which the engine computes.
        executor: A `concurrent.futures.Executor` that evaluates the members of a batch at once:
            threads, processes, or `dask.distributed`'s `Client.get_executor()`. Draws do not
            depend on it. Processes and clusters need an engine that can be pickled.
        on_error: `"raise"`, or a number which is the value, with zero gradient, wherever the engine
            raises an exception. `-np.inf` makes a sampler reject. A reply of a wrong form, and the
            loss of an executor, always raise.
        name: Prefix of the ops, and what errors call the engine; by default its own name.

    Returns:
        A function of tensors, arrays or numbers, or structures of them, that returns the value as a
        tensor `[batch...]`, or `(value, aux)` with `aux` of `dtype`, `[batch..., ...]`. Value and
        gradients have the dtype of their arguments, the value the widest of these. Static shapes
        are those of the arguments. `calls`, `failures` and `seconds` count calls of the engine,
        those that raised, and the wall time of all. Second derivatives are
        unconnected, and incomplete in nonlinear functions of the result.

        Without an executor, one call is made at a time, from whichever threads TensorFlow calls;
        the counters are exact. No call is made for an empty batch. `tf.vectorized_map` calls for
        one member after the other.

    Raises:
        TypeError: An argument that cannot be converted or is complex, a `dtype` that is not
            floating, an executor that is none, an engine that cannot be sent to it, or (when
            called) a reply without a gradient or of something other than real numbers.
        ValueError: Shapes that do not broadcast, wrong `event_ndims` or `on_error`, or (when
            called) a reply of a wrong shape or structure. In graphs what is raised when called
            arrives as a `tf.errors.OpError` with the same message.
        RuntimeError: The engine raised: its own message, and the arguments; or no answer came from
            the executor.
        NotImplementedError: While tracing for XLA, `jit_compile=True`, which cannot call the host.
        AssertionError: From `tf.saved_model.save`, for a function that calls the engine.

    The embedding is that of `custom_gradient`, `value + <stop(gradient), x - stop(x)>`.
    """
    name = name or _arguments.name_of(fn)
    engine = Engine(
        fn,
        grad,
        vectorized=vectorized,
        dtype=dtype,
        executor=executor,
        on_error=on_error,
    )
    return HostFunction(fn, engine, event_ndims, has_aux, name)


class HostFunction:
    """A function whose value and gradient are computed outside TensorFlow; made by `from_numpy`."""

    def __init__(
        self, fn: Callable[..., Any], engine: Engine, event_ndims: Any, has_aux: bool, name: str
    ) -> None:
        _arguments.imitate(self, fn)
        self._signature = _arguments.signature_of(fn)
        self._engine, self._event_ndims = engine, event_ndims
        self._has_aux, self._name = has_aux, name

    @property
    def calls(self) -> int:
        """How often the engine was called: for each member of a batch, or once if vectorized."""
        return self._engine.calls

    @property
    def failures(self) -> int:
        """How many of the calls raised an exception."""
        return self._engine.failures

    @property
    def seconds(self) -> float:
        """Wall time of all evaluations in seconds, waiting for an executor included."""
        return self._engine.seconds

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The value, with the gradient that the engine returned; with aux `(value, aux)`."""
        args, names = self._arguments(args, kwargs)
        for name, argument in zip(names, args, strict=True):
            _foreign.refuse_tensors(self._name, name, argument)
        # Scopes begin with an ASCII letter or digit, and names may begin with "_" or be Greek.
        with tf.name_scope(re.sub(r"[^A-Za-z0-9_]", "", self._name).lstrip("_") or "host"):
            flat = [
                leaf
                for name, arg, ndims in zip(names, args, self._by_argument(names), strict=True)
                for leaf in _with_event_ndims(name, arg, ndims)
            ]
            paths, event_ndims = [path for path, _, _ in flat], [ndims for _, _, ndims in flat]
            xs, dtypes, value_dtype = _tensors(flat, self._engine.dtype)
            xs, batch = _broadcast(xs, event_ndims, paths)
            aux_dtype = self._engine.dtype if self._has_aux else None
            layout = Layout(self._name, args, paths, event_ndims, dtypes, value_dtype, aux_dtype)
            value, *gradients = _call_host(self._engine, layout, xs)
            value.set_shape(batch)
            aux = gradients.pop() if self._has_aux else None
            leaves = []
            for x, path, ndims, dtype in zip(xs, paths, event_ndims, dtypes, strict=True):
                if dtype is not None:
                    gx = gradients.pop(0)
                    gx.set_shape(x.shape)
                    batch_ndims = tf.rank(x) - ndims if batch.rank is None else batch.rank
                    leaves.append(_leaves.Leaf(path, x, gx, batch_ndims))
            y = embedding.embed_constant(self._name, value, leaves, _NO_HESSIAN.format(self._name))
        return (y, aux) if self._has_aux else y

    def get_config(self) -> NoReturn:
        """Called by Keras where it stores a model; it would store what it cannot load."""
        raise _foreign.not_stored(self._name)

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], list[str]]:
        """The arguments by position, and their names."""
        signature = self._signature
        if signature is None:
            if kwargs:
                raise TypeError(f"{self._name} takes no keywords, got {list(kwargs)}.")
            return args, [f"args[{i}]" for i in range(len(args))]
        bound = _arguments.bind(signature, args, kwargs, self._name)
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
        if not isinstance(self._event_ndims, (tuple, list)):
            return [self._event_ndims] * len(names)
        if len(self._event_ndims) != len(names):
            raise ValueError(
                f"event_ndims={self._event_ndims} must have one entry for each of the "
                f"{len(names)} arguments ({', '.join(names)}), or be an int for all."
            )
        return self._event_ndims


_NO_HESSIAN = (
    "A second derivative of {0} was asked for, an engine that returns a value and a gradient."
)


def _with_event_ndims(name: str, arg: Any, ndims: Any) -> list[tuple[str, Any, int]]:
    """`(path, leaf, event_ndims)` for every leaf of an argument."""
    if not tf.nest.is_nested(ndims):
        flat = [(path, leaf, ndims) for path, leaf in _leaves.flatten(arg)]
    else:
        flat = _leaves.pair(arg, ndims, name, f"the event_ndims of {name}")
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
    # A number has no dtype of its own: it takes that of the others, or of the engine.
    given = [
        tf.as_dtype(leaf.dtype)
        for _, leaf, _ in flat
        if _arguments.has_derivatives(leaf) and type(leaf) not in (float, complex)
    ]
    floating = [dtype for dtype in given if dtype.is_floating]
    common = _widest(floating) if floating else default
    xs, dtypes = [], []
    for path, leaf, ndims in flat:
        x = _leaves.to_tensor(leaf, path, dtype=common if type(leaf) is float else None)
        if x.dtype.is_complex:
            raise TypeError(
                f"{path} is complex ({x.dtype.name}), and an engine takes real arrays. Pass its "
                "real and its imaginary part as two arguments."
            )
        shape = _leaves.static_shape(x)
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
    xs: Sequence[Any], event_ndims: Sequence[int], paths: Sequence[str]
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
        shapes = ", ".join(
            f"{p} {_shapes.show(_leaves.static_shape(x))}" for p, x in zip(paths, xs, strict=True)
        )
        raise ValueError(
            f"The batch shapes of {shapes} do not broadcast, with event_ndims={list(event_ndims)}. "
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


def _with_event(x: Any, event_ndims: int, path: str) -> Any:
    """Returns `x`, checked to have at least these dimensions: in graphs when they are run."""
    if x.shape.rank is not None:
        return x
    message = f"event_ndims={event_ndims}, but {path} has fewer dimensions:"
    return _leaves.insist(tf.rank(x) >= event_ndims, x, message)


def _front(x: Any, event_ndims: int) -> Any:
    """The static batch shape."""
    return x.shape if x.shape.rank is None else x.shape[: x.shape.rank - event_ndims]


def _call_host(engine: Engine, layout: Layout, xs: Sequence[Any]) -> list[Any]:
    """Values, gradients and perhaps aux, as tensors without a derivative."""
    evaluate = functools.partial(engine.evaluate, layout)
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(out) for out in evaluate(*(x.numpy() for x in xs))]
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise NotImplementedError(
            f"{layout.name} calls the host, which XLA cannot compile. Leave jit_compile=True away, "
            "or put it on functions that do not call the engine; for a Keras model, "
            "compile(jit_compile=False)."
        )
    _forbid_saving(graph)
    # Forward accumulators cannot follow what comes, and need not.
    xs = [tf.stop_gradient(x) for x in xs]
    with tf.device("CPU:0"):  # it has no other kernel, and soft placement may be switched off
        xs = [_at_leisure(x) for x in xs]
        # A pure function: under vectorized_map a stateful one is called once too often.
        return list(
            tf.numpy_function(evaluate, xs, layout.outputs, stateful=False, name="host_call")
        )


def _at_leisure(x: Any) -> Any:
    """Returns `x` some ops later, when what else became ready with it has been run.

    TensorFlow runs an op that takes long where it stands if nothing else is ready. Otherwise it
    wakes another thread for it, which can take longer than the engine. Ops are run in the order in
    which they get ready, and a loop passes `x` on to its next turn in four.
    """
    for _ in range(6):
        x = tf.ensure_shape(x, x.shape)  # grappler would remove an identity
    return x


def _forbid_saving(graph: Any) -> None:
    """Makes `tf.saved_model.save` refuse the function that is being traced.

    It would store the name of a callback of this process. What it cannot store, it says by name, is
    a resource that no object of the model holds.
    """
    with tf.init_scope():
        if tf.executing_eagerly() and hasattr(graph, "capture"):
            graph.capture(_unsavable())


@functools.cache
def _unsavable() -> Any:
    reason = (
        "A host engine (from_numpy, from_torch, from_jax) cannot be stored in a SavedModel: it is "
        "Python code of this process. Store the parameters instead."
    )
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=reason)
    handle._parent_trackable = lambda: None  # else TensorFlow searches all of memory for a parent
    return handle
