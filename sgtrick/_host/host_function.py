"""A host engine as a function of tensors."""

import contextlib
import copy
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex

import tensorflow as tf

from sgtrick._arguments import calls, shapes, structures
from sgtrick._core import embedding
from sgtrick._host import derivatives, foreign
from sgtrick._host.arguments import (
    broadcast_batches,
    by_position,
    padded,
    tensors_of,
)
from sgtrick._host.contract import CallSpec
from sgtrick._host.derived import Derived
from sgtrick._host.engine import COUNTERS, Engine, Functions, Options
from sgtrick._host.host_call import HostCall
from sgtrick._host.progress import progress
from sgtrick._host.value_shape import ValueShape
from sgtrick._tensorflow.autograph import unconverted
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Args, Function, Kwargs, Structure, Tensor


class HostFunction:
    """A function whose value and gradient are computed outside TensorFlow; made by `from_numpy`.

    >>> import sgtrick
    >>> import tensorflow as tf
    >>> h = sgtrick.from_numpy(lambda x: (x @ x, 2 * x))
    >>> print(h(tf.constant([1.0, 2.0])).numpy(), h.calls, isinstance(h, sgtrick.HostFunction))
    5.0 1 True
    """

    def __init__(
        self,
        functions: Functions,
        options: Options,
        derive: Callable[[Function, str], Derived] | None = None,
        bound_to: tuple[object, str] | None = None,
    ) -> None:
        """See `from_numpy`.

        `derive` is for functions that a framework differentiates: from the function and its name to
        those of an engine. `bound_to` is for methods: the object, and the name of the attribute in
        its class.
        """
        if isinstance(functions.fn, staticmethod):
            functions = functions._replace(fn=functions.fn.__func__)
            self._is_method = False
        else:
            self._is_method = bound_to is None
        self._functions, self._options, self._derive = functions, options, derive
        self._bound_to, self._of_classes = bound_to, dict[type, HostFunction]()
        fn = functions.fn.__func__ if isinstance(functions.fn, classmethod) else functions.fn
        calls.check_function(fn, "fn")
        calls.imitate(self, fn)
        self._attribute, self._owner = calls.name_of(fn), type(None)
        self._callee = calls.Callee(fn)
        self._callee.form = self
        self._event_ndims, self._has_aux = options.event_ndims, options.has_aux
        self._name = options.name or calls.name_of(fn)
        self._derived = derive(fn, self._name) if derive else None
        self._given = functions._replace(fn=fn)
        self._engines: dict[bool, Engine] = {}  # by whether the value is one number
        is_found = options.value_shape is None and derive is not None
        self._value = None if is_found else ValueShape(options.value_shape)
        self._engine = self._engine_for(self._value or ValueShape(()))

    def _engine_for(self, value: ValueShape) -> Engine:
        """The engine for a value of this shape."""
        options, functions, key = self._options, self._given, value.is_number
        _check_value_shape(value, functions, options.on_error)
        if key not in self._engines:
            if self._derived is not None:
                functions = self._derived.functions(of_number=key)
            broadcasts = self._derived is not None
            self._engines[key] = Engine(functions, options, broadcasts=broadcasts)
        return self._engines[key]

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
            found = cache[key] = HostFunction(functions, self._options, self._derive, bound_to)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostFunction":
        """A copy with a copied engine and its own counters; the executor is shared."""
        if self._bound_to is not None:
            instance, attribute = self._bound_to
            return getattr(copy.deepcopy(instance, memo), attribute)  # type: ignore[no-any-return]
        functions = Functions(*copy.deepcopy(tuple(self._functions), memo))
        return HostFunction(functions, self._options, self._derive)

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
    def vjp_calls(self) -> int:
        """Number of calls of `vjp`."""
        return int(self._counted("vjp_calls"))

    @property
    def jvp_calls(self) -> int:
        """Number of calls of `jvp`."""
        return int(self._counted("jvp_calls"))

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

    def progress(
        self, total: int | None = None, desc: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A scope that shows the calls made in it as a bar, while a compiled sampler runs.

        The bar, of tqdm (`pip install sgtrick[progress]`), has the number of calls, calls a second
        and, if there are any, failures. Where there is neither a terminal nor a notebook, nothing
        is shown.

            with log_prob.progress(total=1000, desc="warm-up"):
                sample()

        Args:
            total: How many calls are expected, if that is known: then the bar fills up.
            desc: What stands before the bar, by default the name of the engine.

        Raises:
            ImportError: tqdm is not installed.
        """
        return progress(lambda: (self.calls, self.failures), total, desc or self._name)

    def _counted(self, name: str) -> float:
        # Since Python 3.13, what a classmethod returns has the counters of the function in it.
        functions = (self, *self._of_classes.values())
        return float(sum(getattr(e, name) for f in functions for e in f._engines.values()))

    def __repr__(self) -> str:
        """The name, the options that differ from their defaults, and the counters."""
        usual = Options(self._derive is not None, "float64", None, "raise", 1, False, None)
        stated = [
            f"{'vmap' if self._derive and key == 'vectorized' else key}="
            f"{type(value).__name__ if key == 'executor' else repr(value)}"
            for key, value in self._options._asdict().items()
            if value is not None and value != getattr(usual, key)
        ]
        given = self._functions._asdict()
        del given["fn"]
        for key, f in given.items():
            if f is not None:
                stated.append(f"{key}={f!r}" if isinstance(f, (str, bool)) else key)
        counts = ", ".join(f"{name} {round(getattr(self, name), 3)}" for name in COUNTERS)
        return f"<host engine {', '.join([self._name, *stated])}: {counts}>"

    def __call__(self, *args: Structure, **kwargs: Structure) -> Structure:
        """The value with the gradient that the engine returned, or `(value, aux)`."""
        # AutoGraph rewrites the __call__ of an object even if it is told not to.
        return self._evaluate(args, kwargs)

    @unconverted
    def _evaluate(self, args: Args, kwargs: Kwargs) -> Structure:
        if self._callee.receivers(args):  # a method called on its class, or under a classmethod
            method = self.__get__(args[0], type(args[0]))
            if method is not self:
                return method(*args[1:], **kwargs)
        args, flat = by_position(self._callee, args, kwargs, self._event_ndims, self._name)
        # Scopes must begin with an ASCII letter or digit; names may begin with "_" or be Greek.
        with tf.name_scope(re.sub(r"[^A-Za-z0-9_]", "", self._name).lstrip("_") or "host"):
            call, xs, hosted, batch = self._prepared(args, flat)
            # In a branch of tf.cond, gradients reach only tensors that belong to the branch.
            xs, hosted = list(map(here, xs)), list(map(here, hosted))
            spec = call.spec
            told = call.evaluate(hosted)
            aux = told.pop() if self._has_aux else None
            n, points = len(spec.value.shapes), [xs[k] for k in spec.places]
            values, told = told[:n], told[n:]
            for value, shape in zip(values, spec.value.shapes, strict=True):
                value.set_shape(batch.concatenate(shape))
            if not tf.executing_eagerly():
                # On the caller's device; the call is on the CPU.
                values = list(map(tf.identity, values))
            count = n * len(points) if spec.has_gradient else 0
            gradients, failures = told[:count], told[count:]
            for failed in failures:
                failed.set_shape(batch)
            at = [*hosted, *failures]
            if gradients:
                rows = [gradients[i : i + len(points)] for i in range(0, count, len(points))]
                jacobians = [
                    _leaves(spec, batch.concatenate(shape), batch, points, row)
                    for shape, row in zip(spec.value.shapes, rows, strict=True)
                ]
                values = derivatives.with_gradients(call, at, values, jacobians)
            else:
                values = derivatives.by_products(call, at, points, values)
            y = spec.value.pack(values)
            if aux is None:
                return y
            return y, embedding.auxiliary(self._name, aux, points)

    def get_config(self) -> NoReturn:
        """Raises: Keras calls it when it stores a model, and could not load what it stored."""
        raise foreign.not_stored(self._name)

    def _prepared(
        self, args: Args, flat: Sequence[tuple[str, Any, int]]
    ) -> tuple[HostCall, list[Tensor], list[Tensor], tf.TensorShape]:
        """The host call, the leaves as points and as sent to the host, and the batch shape.

        The points have the batch shape of the value. Leaves that all members share are sent to the
        host once, which broadcasts them itself.
        """
        paths, event_ndims = [path for path, _, _ in flat], [ndims for _, _, ndims in flat]
        engine, value = self._engine, self._value
        xs, dtypes, value_dtype = tensors_of(flat, engine.dtype)
        points, batch = broadcast_batches(xs, event_ndims, paths)
        # Only the structure: TensorFlow keeps callbacks alive, and tensors keep their graph alive.
        like = tf.nest.map_structure(lambda _: None, args)
        if value is None:
            assert self._derived is not None
            events = [
                (_event_shape(x, n), x.dtype.as_numpy_dtype if dtype is None else engine.dtype)
                for x, n, dtype in zip(xs, event_ndims, dtypes, strict=True)
            ]
            value = ValueShape(self._derived.value_shape(like, events))
            engine = self._engine_for(value)
        spec = CallSpec(
            self._name,
            like,
            paths,
            event_ndims,
            dtypes,
            value,
            value_dtype,
            aux_dtype=engine.dtype if self._has_aux else None,
            has_gradient=engine.gives_gradient,
            tells_failures=engine.tells_failures,
        )
        hosted = points if batch.rank is None else padded(xs, event_ndims, batch.rank)
        return HostCall(engine, spec), points, hosted, batch


def _check_value_shape(value: ValueShape, functions: Functions, on_error: str | float) -> None:
    if not value.is_number and callable(functions.hess):
        raise TypeError(
            "hess is the Hessian of one number, but value_shape is not (). Pass hessp, a function "
            "of (*arrays, u, v) that returns the Hessian of the sum of u * value times v."
        )
    if not value.is_known and on_error != "raise":
        raise ValueError(
            f"on_error={on_error!r} fills the value, so its shape must be known, but value_shape "
            f"is {value.pack(value.shapes)}. Pass all dimensions, or leave on_error out."
        )


def _leaves(
    spec: CallSpec,
    front: tf.TensorShape,
    batch: tf.TensorShape,
    points: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> list[structures.Leaf]:
    """The points with the gradients or Jacobians of a value of the shape `front`."""
    leaves = []
    for k, x, gx in zip(spec.places, points, gradients, strict=True):
        ndims = spec.event_ndims[k]
        gx.set_shape(front.concatenate(_event_shape(x, ndims)))
        batch_ndims = tf.rank(x) - ndims if batch.rank is None else batch.rank
        leaves.append(structures.Leaf(spec.paths[k], x, gx, batch_ndims))
    return leaves


def _event_shape(x: Tensor, ndims: int) -> shapes.Shape:
    """The last dimensions, as far as they are known."""
    shape = structures.static_shape(x)
    return (None,) * ndims if shape is None else shape[len(shape) - ndims :]
