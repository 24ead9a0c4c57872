"""What a transformation is run on, and what should come out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

Function = Callable[..., Any]
Outcome = dict[str, Any]


def configure() -> None:
    """Three logical CPUs, for replicas and placement. Before anything else runs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if len(tf.config.get_logical_device_configuration(cpu) or ()) < 3:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 3
        )


def traced(f: Function, **options: Any) -> Any:
    """`tf.function` without AutoGraph, for the hundreds of functions that only a table of tests traces.

    They have nothing that it converts, and it takes a seventh of the time. What users write in a
    `tf.function` themselves is tested with it, as they have it.
    """
    return tf.function(f, autograph=False, **options)


@dataclass(frozen=True)
class Problem:
    """A point, what is pulled back there and what is pushed forward."""

    truth: Function
    args: tuple[np.ndarray, ...]
    upstream: np.ndarray
    tangents: tuple[np.ndarray, ...]
    mapped: bool  # the first axis of everything is that of members, for each of which truth holds

    @cached_property
    def expected(self) -> Outcome:
        """By reverse mode in eager, one scalar at a time."""
        if self.mapped:
            members = [member.expected for member in self.members]
            stacked = {
                key: [np.stack(parts) for parts in zip(*(m[key] for m in members), strict=True)]
                for key in ("vjp", "batch_jacobian", "hvp", "hvp_of_square")
            }
            block_diagonal = []
            for blocks in stacked["batch_jacobian"]:
                n, y = len(blocks), blocks.shape[1 : self.upstream.ndim]
                full = np.zeros((n, *y, n, *blocks.shape[self.upstream.ndim :]))
                for i in range(n):
                    full[(i, *[slice(None)] * len(y), i)] = blocks[i]
                block_diagonal.append(full)
            return stacked | {
                "value": np.stack([m["value"] for m in members]),
                "jvp": np.stack([m["jvp"] for m in members]),
                "curvature": sum(m["curvature"] for m in members),
                "jacobian": block_diagonal,
            }
        args = [tf.constant(a) for a in self.args]
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(args)
            with tf.GradientTape(persistent=True) as inner:
                inner.watch(args)
                y = self.truth(*args)
                s = tf.reduce_sum(self.upstream * y)
                q = tf.reduce_sum(self.upstream * y**2) / 2
            pulled = inner.gradient(s, args)
            pulled_q = inner.gradient(q, args)
            directional = sum(
                tf.reduce_sum(g * t) for g, t in zip(pulled, self.tangents, strict=True)
            )
            directional_q = sum(
                tf.reduce_sum(g * t) for g, t in zip(pulled_q, self.tangents, strict=True)
            )
        hvp = [g.numpy() for g in connected(outer.gradient(directional, args), args)]
        jacobian = [j.numpy() for j in inner.jacobian(y, args, experimental_use_pfor=False)]
        jvp = sum(np.tensordot(j, t, t.ndim) for j, t in zip(jacobian, self.tangents, strict=True))
        return {
            "value": y.numpy(),
            "vjp": [g.numpy() for g in pulled],
            "jacobian": jacobian,
            "batch_jacobian": jacobian,
            "jvp": jvp,
            "hvp": hvp,
            "hvp_of_square": [
                g.numpy() for g in connected(outer.gradient(directional_q, args), args)
            ],
            "curvature": sum(np.sum(t * h) for t, h in zip(self.tangents, hvp, strict=True)),
        }

    @cached_property
    def members(self) -> list["Problem"]:
        """The problem of each member."""
        return [
            Problem(
                self.truth,
                tuple(a[i] for a in self.args),
                self.upstream[i],
                tuple(t[i] for t in self.tangents),
                mapped=False,
            )
            for i in range(len(self.upstream))
        ]


_PROBLEMS: dict[Any, "Problem"] = {}  # hold the arrays whose identities are keys


@dataclass(frozen=True)
class Case:
    """A true function and the form under test, which must be equal in value and derivatives.

    `form` must have a forward computation whose own derivative is not the true one, so that a cell
    that drops the custom derivative is seen.

    Attributes:
        name: Shown in test ids.
        truth: From member to member's value, native TensorFlow.
        form: The same, by the form under test.
        args: One array per argument, the first axis being that of the members.
        batched: Whether `form` may be called with all members at once.
        order: Through which order the derivatives of `form` are promised to be exact. Those of the
            next one have to be unknown.
        stored: Whether `form` keeps its derivative in a SavedModel without custom gradients. If not,
            that has to be unknown.
    """

    name: str
    truth: Function
    form: Function
    args: tuple[np.ndarray, ...]
    batched: bool = True
    order: int = 2
    stored: bool = False
    seed: int = field(default=0, repr=False)

    @cached_property
    def members(self) -> Problem:
        """All members. Cases of one function at the same points share what is expected."""
        key = (self.truth, *map(id, self.args), self.seed)
        if key not in _PROBLEMS:
            _PROBLEMS[key] = self._members()
        return _PROBLEMS[key]

    def _members(self) -> Problem:
        random = np.random.default_rng(self.seed)
        y = np.stack([self.truth(*member).numpy() for member in zip(*self.args, strict=True)])
        return Problem(
            self.truth,
            self.args,
            random.uniform(0.5, 2.0, y.shape),  # non-uniform, so that means and leaks are seen
            tuple(random.normal(size=a.shape) for a in self.args),
            mapped=True,
        )

    @cached_property
    def whole(self) -> Problem:
        """What the form takes in one call."""
        return self.members if self.batched else self.members.members[0]


# What an error that says what to do is not.
SLIPS = (AssertionError, AttributeError, IndexError, KeyError, NameError, RecursionError)
LOUD = {"raises", "NaN"}  # the verdicts that say that something is unknown


def verdict(run: Callable[[], Any], expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> str:
    """What `run()` gives: `raises`, or what `compare` says."""
    try:
        came = run()
    except SLIPS:
        raise
    except Exception:
        return "raises"
    return compare(came, expected, rtol, atol)


def compare(came: Any, expected: Any, rtol: float, atol: float) -> str:
    """`right`, `NaN` (nothing that is finite is wrong), `None` (no gradient) or `wrong`.

    An outcome is compared with what is expected of its parts. Nothing is right where NaN is expected.
    """
    if isinstance(came, dict):
        expected = [b for key in came for b in as_list(expected[key])]
        came = [a for part in came.values() for a in as_list(part)]
    came, expected = as_list(came), as_list(expected)
    if any(a is None for a in came):
        return "None"
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(came, expected, strict=True)]
    not_expected = [
        a[~np.isclose(a, b, rtol, atol)] if a.shape == b.shape else a.ravel() for a, b in pairs
    ]
    if any(np.any(np.isfinite(a)) for a in not_expected):
        return "wrong"
    if any(a.size for a in not_expected):
        return "NaN"
    return "right" if all(a.shape == b.shape for a, b in pairs) else "wrong"


def as_list(value: Any) -> list[Any]:
    """A single result as a list of one."""
    return value if isinstance(value, list) else [value]


def connected(gradients: Any, args: Any) -> list[Any]:
    """Zeros in the place of None."""
    return [tf.zeros_like(a) if g is None else g for g, a in zip(gradients, args, strict=True)]
