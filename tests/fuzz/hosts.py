"""Host engines drawn at random, and what they should give by a loop of NumPy over the members.

The function is `t + t^2 / 2` of `t = sum_k a_k sum(sin(x_k)) + ...`: every leaf has a part in every
derivative, and the Hessian is full. Leaves without derivatives add a constant to `t`.
"""

import concurrent.futures
import contextlib
import dataclasses
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np
import tensorflow as tf

import sgtrick
from fuzz import ways

LOUD = (RuntimeError, TypeError, ValueError, LookupError, tf.errors.OpError)
SIZES = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
FAULTS = ("value", "gradient", "structure", "no gradient", "complex", "text")
WAYS = (
    "eager", "graph", "around", "unknown dimensions", "unknown ranks", "vectorized_map", "map_fn",
    "accumulator", "jacobian", "second",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A part of the arguments.

    Attributes:
        batch: Its batch shape, which broadcasts to that of all.
        event: Its own shape.
        dtype: The name of its dtype.
        kind: `tensor`, `variable`, `array`, or `number` where there are no dimensions.
        known: Whether the engine gives its gradient.
    """

    batch: tuple[int, ...] = ()
    event: tuple[int, ...] = ()
    dtype: str = "float64"
    kind: str = "tensor"
    known: bool = True

    @property
    def live(self) -> bool:
        return self.dtype in SIZES

    def array(self, k: int) -> np.ndarray:
        """The entries of leaf `k`."""
        shape = self.batch + self.event
        n = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        if self.dtype == "bytes":
            return np.where((n + k) % 2, b"one", b"").astype(object)
        if self.live:
            return (np.sin(1.0 + k + 1.7 * n) * 1.2).astype(self.dtype)
        return ((n + k) % 2).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Host:
    """An engine and what it is called with.

    Attributes:
        arguments: Leaves, or tuples or dicts of leaves.
        way: The transformation, one of `WAYS`.
        vectorized: As the option; so are `dtype`, `has_aux` and `on_error`.
        apart: Whether the gradient is a function of its own.
        hessian: `hess`, `hessp` or none.
        threads: Of the executor, 0 without one.
        keyword: Whether the last argument is passed by its name.
        above: The engine fails where `t` is larger.
        fault: What is wrong with its replies, if anything.
        careless: Whether the engine spoils its arguments, where it may, and gives the same arrays
            each time.
        method: Whether it is a method, of one of two objects.
    """

    arguments: tuple[Any, ...]
    way: str = "eager"
    vectorized: bool = False
    dtype: str = "float64"
    has_aux: bool = False
    on_error: Any = "raise"
    apart: bool = False
    hessian: str | None = None
    threads: int = 0
    keyword: bool = False
    above: float = np.inf
    fault: str | None = None
    careless: bool = False
    method: bool = False

    # What the arguments are.

    @property
    def leaves(self) -> list[Leaf]:
        return tf.nest.flatten(self.arguments)

    @property
    def batch(self) -> tuple[int, ...]:
        return np.broadcast_shapes(*(leaf.batch for leaf in self.leaves))

    @property
    def live(self) -> list[int]:
        return [k for k, leaf in enumerate(self.leaves) if leaf.live]

    @property
    def watched(self) -> list[int]:
        """Those by which derivatives are taken."""
        return [k for k in self.live if self.leaves[k].kind in ("tensor", "variable")]

    @property
    def event_ndims(self) -> Any:
        ndims = tf.nest.map_structure(lambda leaf: len(leaf.event), self.arguments)
        flat = set(tf.nest.flatten(ndims))
        return flat.pop() if len(flat) == 1 else ndims

    @property
    def value_dtype(self) -> str:
        """The widest of the arguments' own; numbers have none."""
        own = {x.dtype for x in self.leaves if x.live and x.kind != "number"}
        if own == {"float16", "bfloat16"}:
            return "float32"
        return max(own, key=lambda d: np.dtype(d).itemsize) if own else self.dtype

    # The engine, on arrays with any number of batch dimensions.

    def _t(self, leaves: list[np.ndarray]) -> Any:
        t = 0.0
        for k, (leaf, a) in enumerate(zip(self.leaves, leaves, strict=True)):
            terms = (0.5 + k) * np.sin(a) if leaf.live else 0.25 * (a == (b"", 0)[a.dtype != "O"])
            t = t + terms.sum(tuple(range(a.ndim - len(leaf.event), a.ndim)))
        return t

    def _slopes(self, leaves: list[np.ndarray], f: Any = np.cos) -> list[Any]:
        """Of `t`, or what `f` makes of them; None for leaves without derivatives."""
        pairs = enumerate(zip(self.leaves, leaves, strict=True))
        return [(0.5 + k) * f(a) if leaf.live else None for k, (leaf, a) in pairs]

    def _packed(self, flat: list[Any]) -> Any:
        packed = tf.nest.pack_sequence_as(self.arguments, flat)
        return packed if len(packed) > 1 else packed[0]

    def _over(self, t: Any, leaf: Leaf) -> Any:
        return np.reshape(t, np.shape(t) + (1,) * len(leaf.event))

    def _checked(self, arguments: tuple[Any, ...]) -> tuple[list[np.ndarray], Any]:
        """The leaves and `t`, where the engine does not fail."""
        tf.nest.assert_same_structure(self.arguments, arguments)
        leaves = tf.nest.flatten(arguments)
        for leaf, a in zip(self.leaves, leaves, strict=True):
            assert a.shape[a.ndim - len(leaf.event) :] == leaf.event
            if leaf.live:
                assert a.dtype == self.dtype
        t = self._t(leaves)
        if np.any(t > self.above):
            raise ArithmeticError("no solution")
        return leaves, t

    def value(self, *arguments: Any) -> Any:
        _, t = self._checked(arguments)
        y = t + t**2 / 2
        y = {"value": lambda: y[..., None], "complex": lambda: y + 1j, "text": lambda: "y"}.get(
            self.fault, lambda: y
        )()
        return (y, np.stack([t, 2 * t], -1)) if self.has_aux else y

    def gradient(self, *arguments: Any) -> Any:
        leaves, t = self._checked(arguments)
        flat = [
            self._over(1 + t, leaf) * slope if leaf.live and leaf.known else None
            for leaf, slope in zip(self.leaves, self._slopes(leaves), strict=True)
        ]
        if self.fault == "gradient":
            flat = [None if g is None else g[..., None] for g in flat]
        packed = self._packed(flat)
        return (packed, None, None, None) if self.fault == "structure" else packed

    def both(self, *arguments: Any) -> Any:
        return self.value(*arguments), self.gradient(*arguments)

    def hessp(self, *arguments: Any) -> Any:
        *arguments, v = arguments
        leaves, t = self._checked(tuple(arguments))
        vs = tf.nest.flatten(v if len(arguments) > 1 else (v,))
        slopes, bends = self._slopes(leaves), self._slopes(leaves, lambda a: -np.sin(a))
        along = sum(
            (slopes[k] * vs[k]).sum(tuple(range(np.ndim(t), slopes[k].ndim))) for k in self.live
        )
        flat = [None] * len(leaves)
        for k in self.live:
            leaf = self.leaves[k]
            flat[k] = self._over(1 + t, leaf) * bends[k] * vs[k]
            flat[k] = flat[k] + self._over(along, leaf) * slopes[k]
        return self._packed(flat)

    def hess(self, *arguments: Any) -> Any:
        leaves, t = self._checked(arguments)
        slopes, bends = self._slopes(leaves), self._slopes(leaves, lambda a: -np.sin(a))
        front = np.shape(t)

        def block(i: int, j: int) -> Any:
            if i not in self.live or j not in self.live:
                return None
            shape = front + self.leaves[i].event + self.leaves[j].event
            a, b = slopes[i].reshape((*front, -1, 1)), slopes[j].reshape((*front, 1, -1))
            h = a * b
            if i == j:
                diagonal = (self._over(1 + t, self.leaves[i]) * bends[i]).reshape((*front, -1, 1))
                h = h + diagonal * np.eye(diagonal.shape[-2])
            return h.reshape(shape)

        places = range(len(leaves))

        return self._packed([self._packed([block(i, j) for j in places]) for i in places])

    def form(self, executor: Any) -> Any:
        functions: Any = {"fn": self.value, "grad": self.gradient}
        if not self.apart:
            functions = {"fn": self.both}
        if self.fault == "no gradient":
            functions = {"fn": self.value}
        if self.hessian is not None:
            functions[self.hessian] = getattr(self, self.hessian)
        names = "xyz"[: len(self.arguments)]
        for key, f in functions.items():
            f = _careless(f) if self.careless else f
            functions[key] = _named(f, names + "v" * (key == "hessp"), self.method)
        engine = sgtrick.from_numpy(
            **functions,
            event_ndims=self.event_ndims,
            vectorized=self.vectorized,
            has_aux=self.has_aux,
            dtype=self.dtype,
            executor=executor,
            on_error=self.on_error,
            name="engine",
        )
        if not self.method:
            return engine
        owner = type("Owner", (_Owner,), {"engine": engine})
        assert owner(is_used=False).engine.calls == 0
        return owner(is_used=True).engine

    # What should come.

    def arrays(self) -> list[np.ndarray]:
        """The leaves as the engine reads them, broadcast."""
        found = []
        for k, leaf in enumerate(self.leaves):
            a = leaf.array(k)
            if leaf.kind == "number" and leaf.live:
                a = a.astype(self.value_dtype)
            if leaf.live:
                a = a.astype(self.dtype)
            found.append(self._broadcast(leaf, a))
        return found

    def _broadcast(self, leaf: Leaf, a: np.ndarray) -> np.ndarray:
        ones = (1,) * (len(self.batch) - len(leaf.batch))
        return np.broadcast_to(a.reshape(ones + a.shape), self.batch + leaf.event)

    def weights(self) -> np.ndarray:
        """What multiplies the values."""
        return 1 + np.cos(np.arange(np.prod(self.batch, dtype=int)).reshape(self.batch)) / 2

    def directions(self) -> list[np.ndarray]:
        """What multiplies the gradients, zero where none is asked for."""
        shapes = (leaf.batch + leaf.event for leaf in self.leaves)
        return [
            np.cos(k + np.arange(np.prod(s, dtype=int))).reshape(s) * (k in self.watched)
            for k, s in enumerate(shapes)
        ]

    def expected(self) -> dict[str, Any] | None:
        """By a loop over the members, None where an error is due."""
        good = dataclasses.replace(self, fault=None, vectorized=False)
        wide = self.arrays()
        vs = [self._broadcast(*pair) for pair in zip(self.leaves, self.directions(), strict=True)]
        value, along = np.zeros(self.batch), np.zeros(self.batch)
        gradients, second = ([np.zeros(a.shape) for a in wide] for _ in range(2))
        aux, failures = np.full((*self.batch, 2), np.nan), 0
        for i in np.ndindex(*self.batch):
            member = [np.array(a[i], a.dtype) for a in wide]
            arguments = tf.nest.pack_sequence_as(self.arguments, member)
            try:
                y = good.value(*arguments)
            except ArithmeticError:
                if self.on_error == "raise":
                    return None
                failures += 1
                value[i] = self.on_error
                for k in self.live:
                    second[k][i] = np.nan
                continue
            if self.fault is not None:
                return None
            value[i], aux[i] = y if self.has_aux else (y, np.nan)
            v = self._packed([v[i] for v in vs])
            gs, hs = good.gradient(*arguments), good.hessp(*arguments, v)
            gs, hs = tf.nest.flatten(gs), tf.nest.flatten(hs)
            for k in self.live:
                gradients[k][i] = np.nan if gs[k] is None else gs[k]
                second[k][i] = hs[k]
                along[i] += np.sum(gradients[k][i] * vs[k][i]) if k in self.watched else 0
        return {
            "value": value,
            "gradients": [self._summed(self.leaves[k], gradients[k]) for k in self.watched],
            "along": along,
            "second": [self._summed(self.leaves[k], second[k]) for k in self.watched],
            "aux": aux if failures < value.size else np.full(self.batch, np.nan),
            "counts": [np.float64(self._calls(failures)), np.float64(failures)],
        }

    def _calls(self, failures: int) -> int:
        members = int(np.prod(self.batch, dtype=int))
        if not self.vectorized:
            return members
        return min(members, 1) + (members if failures and members > 1 else 0)

    def _summed(self, leaf: Leaf, g: np.ndarray) -> np.ndarray:
        """Times the weights, and over what was repeated."""
        g = g * self._over(self.weights(), leaf)
        g = g.sum(tuple(range(len(self.batch) - len(leaf.batch))))
        ones = tuple(i for i, n in enumerate(leaf.batch) if n == 1)
        return g.sum(ones, keepdims=True)

    # What comes.

    def verdict(self) -> str:
        """`right`, or what is wrong."""
        expected = self.expected()
        pool = concurrent.futures.ThreadPoolExecutor(self.threads) if self.threads else None
        with pool or contextlib.nullcontext():
            form = self.form(pool)
            try:
                came = self._came(form)
            except LOUD as error:
                if expected is None:
                    is_due = "engine" in str(error)
                else:
                    is_due = self.way == "second" and self.hessian is None and "hessp" in str(error)
                return "right" if is_due else f"{error!r}, expected {expected}"
        if expected is None:
            return f"no error, but {came}"
        if self.way == "second" and self.hessian is None and 0 not in self.batch:
            is_loud = all(g is not None and not np.any(np.isfinite(g)) for g in came["second"])
            return "right" if is_loud else f"no error without a Hessian, but {came}"
        return self._compared(came, expected) or "right"

    def _came(self, form: Any) -> dict[str, Any]:
        def call(flat: list[Any]) -> list[Any]:
            arguments = tf.nest.pack_sequence_as(self.arguments, flat)
            keywords = {}
            if self.keyword:
                keywords = {"xyz"[len(arguments) - 1]: arguments[-1]}
                arguments = arguments[:-1]
            y = form(*arguments, **keywords)
            y, *aux = y if self.has_aux else (y,)
            return [y, *aux]

        came = getattr(ways, self.way.replace(" ", "_"))(self, call, self._points())
        if self.way == "eager":  # where nothing is called twice or left out
            came["counts"] = [np.float64(form.calls), np.float64(form.failures)]
        if self.careless:  # another call harms none that was answered
            with contextlib.suppress(*LOUD):
                call(self._points(-0.5))
        return came

    def _points(self, times: float = 1.0) -> list[Any]:
        points = []
        for k, leaf in enumerate(self.leaves):
            a = leaf.array(k)
            a = (a * times).astype(a.dtype) if leaf.live else a
            if leaf.kind == "number":
                points.append(a.item())
            elif leaf.kind == "array":
                points.append(a)
            else:
                x = tf.constant(a, tf.string if leaf.dtype == "bytes" else None)
                points.append(tf.Variable(x) if leaf.kind == "variable" else x)
        return points

    def _compared(self, came: dict[str, Any], expected: dict[str, Any]) -> str | None:
        used = [self.dtype, self.value_dtype, *(x.dtype for x in self.leaves if x.live)]
        tolerance = 40 * max(SIZES[d] for d in used)
        for key, value in came.items():
            want = expected[key]
            value, want = (v if isinstance(v, list) else [v] for v in (value, want))
            for a, b in zip(value, want, strict=True):
                if a is None:
                    return f"{key} is None, expected {b.tolist()}"
                a = np.asarray(a, np.float64)
                atol = tolerance * (1 + np.abs(b[np.isfinite(b)]).max(initial=0))
                fits = a.shape == b.shape and np.allclose(a, b, tolerance, atol, equal_nan=True)
                if not fits:
                    return f"{key} is {a.tolist()}, expected {b.tolist()}"
        return None


class _Owner:
    """What an engine is a method of."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used

    def own(self, f: Any) -> Any:
        assert self.is_used, "another object is used"
        return f


def _named(f: Any, names: str, is_method: bool) -> Any:
    """`f` with parameters of these names, which the engine is called by."""
    own = ", ".join(names)
    text = f"lambda self, {own}: self.own(f)({own})" if is_method else f"lambda {own}: f({own})"
    return eval(text, {"f": f})


def _careless(f: Any) -> Any:
    """`f`, which spoils its arguments and gives the same arrays each time."""
    kept: dict[Any, np.ndarray] = {}

    def call(*arguments: Any) -> Any:
        y = f(*arguments)
        for a in tf.nest.flatten(arguments):
            if a is not None and a.flags.writeable:
                a[...] = 0
        flat = tf.nest.flatten(y)
        for k, part in enumerate(flat):
            if isinstance(part, np.ndarray):
                flat[k] = kept.setdefault((k, part.shape, part.dtype), np.empty_like(part))
                flat[k][...] = part
        return tf.nest.pack_sequence_as(y, flat)

    return call
