"""A host engine as a function of tensors."""

import contextlib
import copy
import inspect
import re
from collections.abc import Callable
from typing import Any, NoReturn

import tensorflow as tf

from sgtrick._arguments import calls
from sgtrick._host.bound_arguments import BoundArguments, bind, broadcast_batches, padded
from sgtrick._host.derivatives import differentiable_values
from sgtrick._host.engine import COUNTERS, Engine
from sgtrick._host.evaluation import Evaluation
from sgtrick._host.host_call import HostCall
from sgtrick._host.layout import Layout, Space
from sgtrick._host.progress import progress
from sgtrick._tensorflow.autograph import unconverted
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Args, Function, Kwargs, Structure


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
        fn: Function,
        form: Callable[..., "HostFunction"],
        options: Kwargs,
        engine_of: Callable[[str], Engine],
    ) -> None:
        """`form(fn, **options)` makes another one, and `engine_of` its name an engine."""
        if isinstance(fn, (classmethod, staticmethod)):
            raise _no_method(fn.__func__.__name__, form)
        if not callable(fn):
            raise TypeError(f"fn must be a function, got {type(fn).__name__}.")
        self._fn, self._form, self._options = fn, form, options
        self._callee, self._name = calls.Callee(fn), options["name"] or calls.name_of(fn)
        self._callee.form = self
        self._engine = engine_of(self._name)
        self._last: tuple[Any, HostCall | None] = None, None
        calls.imitate(self, fn)

    def __get__(self, instance: object, owner: type | None = None) -> "HostFunction":
        """Raises for an instance: an engine does not become a method."""
        if instance is None:
            return self
        raise _no_method(self._name, self._form)

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostFunction":
        """A copy with a copied engine and its own counters; the executor is shared."""
        executor = self._options.get("executor")
        memo[id(executor)] = executor
        fn, options = copy.deepcopy((self._fn, self._options), memo)
        return self._form(fn, **options)

    @property
    def calls(self) -> int:
        """Number of calls of the engine, one for each batch member, or one in all if vectorized."""
        return int(self._engine.counters["calls"])

    @property
    def vjp_calls(self) -> int:
        """Number of calls of `vjp`."""
        return int(self._engine.counters["vjp_calls"])

    @property
    def jvp_calls(self) -> int:
        """Number of calls of `jvp`."""
        return int(self._engine.counters["jvp_calls"])

    @property
    def hess_calls(self) -> int:
        """Number of calls of `hessp`."""
        return int(self._engine.counters["hess_calls"])

    @property
    def failures(self) -> int:
        """Number of calls that raised an exception.

        If a vectorized engine raised and was called again with batches of one, each member for
        which it raised counts.
        """
        return int(self._engine.counters["failures"])

    @property
    def nonfinite(self) -> int:
        """Number of points at which the value or a derivative was not finite.

        Failures and unknown gradients are not counted.
        """
        return int(self._engine.counters["nonfinite"])

    @property
    def seconds(self) -> float:
        """Total wall time of all evaluations in seconds, including waiting for an executor."""
        return float(self._engine.counters["seconds"])

    def progress(
        self, total: int | None = None, desc: str | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A scope that shows the calls made in it, while a compiled sampler runs.

        As a bar, of tqdm (`pip install sgtrick[progress]`): the number of calls, calls a second
        and, if there are any, failures. Where there is neither a terminal nor a notebook, as a
        plain line on stderr now and then.

            with log_prob.progress(total=1000, desc="warm-up"):
                sample()

        Args:
            total: How many calls are expected, if that is known: then the bar fills up.
            desc: What stands before the bar, by default the name of the engine.

        Raises:
            ImportError: tqdm is not installed.
        """
        return progress(lambda: (self.calls, self.failures), total, desc or self._name)

    def __repr__(self) -> str:
        """The name, the options that differ from their defaults, and the counters."""
        usual = inspect.signature(self._form).parameters
        shown = [self._name]
        for key, value in (self._options | {"dtype": self._engine.dtype.name}).items():
            if callable(value):
                shown.append(key)
            elif value is not None and value != usual[key].default:
                shown.append(f"{key}={type(value).__name__ if key == 'executor' else repr(value)}")
        counts = ", ".join(f"{name} {round(getattr(self, name), 3)}" for name in COUNTERS)
        return f"<host engine {', '.join(shown)}: {counts}>"

    def __call__(self, *args: Structure, **kwargs: Structure) -> Structure:
        """The value, with the derivatives that the engine gives."""
        # AutoGraph rewrites the __call__ of an object even if it is told not to.
        return self._evaluate(args, kwargs)

    @unconverted
    def _evaluate(self, args: Args, kwargs: Kwargs) -> Structure:
        engine = self._engine
        bound = bind(
            self._callee, args, kwargs, engine.takes, engine.argnums, self._name, engine.dtype
        )
        # Scopes must begin with an ASCII letter or digit; names may begin with "_" or be Greek.
        with tf.name_scope(re.sub(r"[^A-Za-z0-9_]", "", self._name).lstrip("_") or "host"):
            leaves = [leaf for leaf in bound.leaves if leaf.is_tensor]
            broadcast, batch = broadcast_batches(leaves)
            # What all members share is sent to the host once, which broadcasts it itself. In a
            # branch of tf.cond, gradients reach only tensors that belong to the branch.
            padded_ones = [padded(leaf, batch.rank) for leaf in leaves]
            sent = list(map(here, padded_ones))
            call = self._host_call(bound)
            layout = call.layout
            points = [
                sent[k] if broadcast[k] is padded_ones[k] else here(broadcast[k])
                for k in layout.places
            ]
            values, extras = call.value(sent)
            for value, shape in zip(values, layout.value.shapes, strict=True):
                value.set_shape(batch.concatenate(shape))
            if not tf.executing_eagerly():
                # On the caller's device; the call is on the CPU.
                values = list(map(tf.identity, values))
            e = Evaluation(call, sent, points, values, extras)
            if not tf.executing_eagerly():
                e.set_shapes()
            return layout.value.pack(differentiable_values(e))

    def _host_call(self, bound: BoundArguments) -> HostCall:
        """The call for these arguments, which is that of the last ones if these are like them."""
        engine, gives = self._engine, self._engine.gives
        value = gives if isinstance(gives, Space) else gives(bound, engine.dtype)
        leaves = [leaf.sent or (type(leaf.x), repr(leaf.x)) for leaf in bound.leaves]
        key = *bound[:2], *bound[3:], id(value), leaves
        last, call = self._last
        if call is None or last != key:
            call = HostCall(engine, Layout(self._name, bound, value))
            self._last = key, call
        return call

    def get_config(self) -> NoReturn:
        """Raises: Keras calls it when it stores a model, and could not load what it stored."""
        raise TypeError(
            f"Keras cannot store {self._name}, a host engine: it is Python code of this process. "
            "Call it in a function that is registered with "
            "keras.saving.register_keras_serializable, and use that as loss, metric, activation or "
            "in a Lambda; or create it in a layer's __init__."
        )


def _no_method(name: str, form: Function) -> TypeError:
    name = name.lstrip("_")
    return TypeError(
        f"{name} is a host engine, which cannot be a method. Leave the decorator out, and create "
        f"the engine in __init__: self.{name} = {form.__name__}(self._{name})."
    )
