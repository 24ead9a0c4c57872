"""What many tests share: ways to run a function, and to differentiate it entry by entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import tensorflow as tf

import sgtrick
from matrix.problem import traced

Form = Callable[[Any], Any]

EXECUTED: dict[str, Callable[[Form], Form]] = {"eager": lambda f: f, "tf.function": tf.function}
WRAPS = pytest.mark.parametrize("wrap", EXECUTED.values(), ids=EXECUTED)


def constant(value: Any, dtype: Any = tf.float64) -> Any:
    return tf.constant(value, dtype)


def with_jvp(rule: Callable[..., Any], f: Form = lambda x: x, **options: Any) -> Any:
    form = sgtrick.custom_jvp(f, **options)
    form.defjvp(rule)
    return form


def on_host(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` of arrays as an operation that TensorFlow cannot differentiate."""

    def call(*tensors: Any) -> Any:
        y = tf.numpy_function(f, tensors, tensors[0].dtype, stateful=False)
        y.set_shape(tensors[0].shape)
        return y

    return call


def gradient(f: Callable[..., Any], x: Any, upstream: Any = None) -> Any:
    """The gradient by `x`, which may be a structure."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x, upstream)


def pushed(f: Callable[..., Any], x: Any, tangent: Any) -> Any:
    """The tangent of `f(x)`."""
    with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
        y = f(x)
    return accumulator.jvp(y)


def derivative(f: Callable[..., Any], k: int = 0) -> Callable[..., Any]:
    """The derivative with respect to argument `k`, entry by entry, by a tape."""

    def run(*args: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(args[k])
            y = f(*args)
        return tape.gradient(y, args[k])

    return run


def gradients(f: Callable[..., Any], *args: Any, by: Any = None, upstream: Any = None) -> Any:
    """The gradients by all arguments, or by these tensors and variables."""
    with tf.GradientTape() as tape:
        tape.watch([a for a in tf.nest.flatten(args) if tf.is_tensor(a) and is_continuous(a)])
        y = f(*args)
    return tape.gradient(y, args if by is None else by, upstream)


def is_continuous(x: Any) -> bool:
    return x.dtype.is_floating or x.dtype.is_complex


def value_and_gradients(h: Callable[..., Any], *args: Any) -> Any:
    """Values, and the gradients of their sum."""
    with tf.GradientTape() as tape:
        tape.watch([a for a in tf.nest.flatten(args) if tf.is_tensor(a) and a.dtype.is_floating])
        y = h(*args)
    return y, tape.gradient(y, args)


def forward_derivative(f: Callable[..., Any], k: int = 0) -> Callable[..., Any]:
    """The derivative with respect to argument `k`, entry by entry, by an accumulator."""

    def run(*args: Any) -> Any:
        with tf.autodiff.ForwardAccumulator(args[k], tf.ones_like(args[k])) as accumulator:
            y = f(*args)
        return accumulator.jvp(y)

    return run


def by_jacobian(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The derivative with respect to the first argument, as the diagonal of `tape.jacobian`."""

    def run(x: Any, *args: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x, *args)
        return tf.linalg.diag_part(tape.jacobian(y, x, **options))

    return run


MODES: dict[str, Callable[..., Form]] = {"reverse": derivative, "forward": forward_derivative}
FORWARD = (forward_derivative,)
TWICE = (derivative, derivative)


def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: tf.vectorized_map(lambda a: f(*a), args, fallback_to_while_loop=False)


def mapped_with_loops(f: Form) -> Form:
    """For what calls the host by an operation that TensorFlow cannot map otherwise."""
    return lambda x: tf.vectorized_map(f, x)


def compiled(f: Form) -> Form:
    return traced(f, jit_compile=True)


WRAPS_AND_XLA = pytest.mark.parametrize(
    "wrap", [*EXECUTED.values(), compiled], ids=[*EXECUTED, "XLA"]
)


def looped(f: Form) -> Form:
    """`f`, by a loop that adds up two halves of it."""

    def run(x: Any) -> Any:
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, y + f(x) / 2), (0, tf.zeros_like(x))
        )[1]

    return run


def itself(f: Form) -> Form:
    return f


@dataclass(frozen=True)
class Way:
    """How a function is differentiated, and what it and its derivatives are put into.

    Attributes:
        inside: What is made of the function.
        between: What is made of its first derivative, before others are taken.
        around: What is made of the last one.
        modes: How each derivative is taken, the first one first.
    """

    inside: Callable[[Form], Form] = itself
    between: Callable[[Form], Form] = itself
    around: Callable[[Form], Form] = itself
    modes: tuple[Callable[..., Form], ...] = (derivative,)

    def __call__(self, f: Form, *modes: Callable[..., Form], **options: Any) -> Form:
        """The derivative of `f` by other modes, if some are given, which may take options."""
        first, *others = modes or self.modes
        f = self.between(first(self.inside(f), **options))
        for mode in others:
            f = mode(f, **options)
        return self.around(f)


WAYS = {
    "eager": Way(),
    "in tf.function": Way(around=traced),
    "around tf.function": Way(inside=traced),
    "in XLA": Way(around=compiled),
    "in vectorized_map": Way(around=mapped),
    "around vectorized_map": Way(inside=mapped),
}
# With `tf.function` as users have it, which converts what is written in Python, in both modes.
FIRST_WAYS = {
    "eager": Way(),
    "in tf.function": Way(around=tf.function),
    "around tf.function": Way(inside=tf.function),
    "forward": Way(modes=FORWARD),
    "forward in tf.function": Way(around=tf.function, modes=FORWARD),
    "forward around tf.function": Way(inside=tf.function, modes=FORWARD),
}


@tf.custom_gradient
def surrogate(w: Any) -> Any:
    """A step that TensorFlow differentiates as something smooth."""
    return tf.cast(w > 0, w.dtype), lambda u: u * tf.exp(-(w**2))


@tf.custom_gradient
def surrogate_product(y: Any, w: Any) -> Any:
    return y * tf.cast(w > 0, w.dtype), lambda u: (u, u * tf.exp(-(w**2)))


# What is made of `y` and of `w`, without a trace of `w` in what TensorFlow tells of its operations.
HIDING: dict[str, Callable[[Any, Any], Any]] = {
    "an array": lambda y, w: y * tf.TensorArray(w.dtype, 1).unstack(tf.stack([w])).read(0),
    "a map": lambda y, w: tf.map_fn(lambda t: t + 0, tf.stack([y * w]))[0],
    "a scan": lambda y, w: tf.scan(lambda a, t: a * t, tf.stack([w, w]), initializer=y)[-1],
    "a surrogate": lambda y, w: y * surrogate(w),
    "a surrogate of two": surrogate_product,
}
