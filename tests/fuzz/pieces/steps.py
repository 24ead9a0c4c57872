"""Transformations of functions, and what each means."""

import tempfile

import tensorflow as tf

from fuzz.pieces.forms import SCALE
from fuzz.pieces.rules import ONE, is_near


def weights(y):
    """What sums up the entries of `y`."""
    n = tf.cast(tf.range(tf.size(y)), y.dtype)
    return tf.reshape(tf.cos(n), tf.shape(y))


def tape(f):
    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = f(x)
        return t.gradient(y, x, weights(y))

    return run


def jacobian(f):
    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = f(x)
        j = t.jacobian(y, x)
        return tf.tensordot(weights(y), j, y.shape.rank)

    return run


def symbolic(f):
    """By `tf.gradients`."""

    @tf.function
    def run(x):
        y = f(x)
        return tf.gradients(y, x, weights(y))[0]

    return run


def accumulator(f):
    def run(x):
        with tf.autodiff.ForwardAccumulator(x, 1 + weights(x)) as a:
            y = f(x)
        return a.jvp(y)

    return run


def twice_in_reverse(f):
    """Forward mode: the pullback is linear, and its transpose is the pushforward."""

    def run(x):
        t = 1 + weights(x)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = f(x)
            u = tf.zeros_like(y)
            outer.watch(u)
            g = inner.gradient(y, x, u)
        return outer.gradient(g, u, t)

    return run


def pullback_by_accumulator(f):
    """The pullback of weights, as their tangent: it is linear in what it pulls back."""

    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = f(x)
        u = 1 + weights(y)
        with tf.autodiff.ForwardAccumulator(u, weights(y)) as a:
            g = t.gradient(y, x, u)
        return a.jvp(g)

    return run


def tangent_by_tape(f):
    """The pullback of weights, as the gradient of the pushforward: it is linear in the tangent."""

    def run(x):
        t = 1 + weights(x)
        with tf.GradientTape() as outer:
            outer.watch(t)
            with tf.autodiff.ForwardAccumulator(x, t) as a:
                y = f(x)
            moved = a.jvp(y)
        return outer.gradient(moved, t, weights(y))

    return run


def tangent_by_accumulator(f):
    """The pushforward, as its own tangent."""

    def run(x):
        t = tf.ones_like(x)
        with tf.autodiff.ForwardAccumulator(t, 1 + weights(x)) as outer:
            with tf.autodiff.ForwardAccumulator(x, t) as inner:
                y = f(x)
            moved = inner.jvp(y)
        return outer.jvp(moved)

    return run


def function(f):
    return tf.function(f)


def function_of_unknown_shape(f):
    def run(x):
        spec = tf.TensorSpec([None] * x.shape.rank, x.dtype)
        return tf.function(f, input_signature=[spec])(x)

    return run


def function_of_unknown_rank(f):
    def run(x):
        return tf.function(f, input_signature=[tf.TensorSpec(None, x.dtype)])(x)

    return run


def xla(f):
    return tf.function(f, jit_compile=True)


def recompute(f):
    return tf.recompute_grad(f)


def saved_model(f):
    """Stored and loaded."""

    def run(x):
        module = tf.Module()
        module.variables_of_pieces = [ONE, SCALE]
        module.f = tf.function(f, input_signature=[tf.TensorSpec(x.shape, x.dtype)])
        with tempfile.TemporaryDirectory() as folder:
            options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
            tf.saved_model.save(module, folder, options=options)
            loaded = tf.saved_model.load(folder)  # whose function does not keep its variables
            return loaded.f(x)

    return run


def loop(f):
    def run(x):
        y = f(x)
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, s: (i + 1, s + f(x * (1 + tf.cast(i, x.dtype) / 4))),
            (0, tf.zeros_like(y)),
            maximum_iterations=2,
        )[1]

    return run


def loop_by_tapes(f):
    return lambda x: f(x) + f(x * 1.25)


def loop_in_autograph(f):
    """A loop of Python's, which TensorFlow converts."""

    @tf.function
    def run(x):
        y = tf.zeros_like(f(x))
        for i in tf.range(2):
            y += f(x * (1 + tf.cast(i, x.dtype) / 4))
        return y

    return run


def branch(f):
    return lambda x: tf.cond(is_near(x), lambda: f(x), lambda: f(2 * x))


def square(f):
    return lambda x: f(x) ** 2


def plus_native(f):
    return lambda x: f(x) + tf.reduce_sum(tf.sin(x))


# Over the first dimension.


def vectorized_map(f):
    return lambda x: tf.vectorized_map(f, x)


def over_members(f):
    return lambda x: tf.stack([f(row) for row in tf.unstack(x)])


def map_fn(f):
    return lambda x: tf.map_fn(f, x)


def scan(f):
    def run(x):
        return tf.scan(lambda _, row: f(row), x, f(x[0]))

    return run


def batch_jacobian(f):
    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = tf.vectorized_map(lambda row: tf.reshape(f(row), [-1]), x)
        j = t.batch_jacobian(y, x)
        return tf.stack([tf.tensordot(weights(y[0]), j_i, 1) for j_i in tf.unstack(j)])

    return run


def same(f):
    return f


# What each means, by eager tapes and Python's loops alone.
BY_TAPES = {
    **dict.fromkeys(
        (tape, jacobian, symbolic, pullback_by_accumulator, tangent_by_tape), tape
    ),
    **dict.fromkeys((accumulator, twice_in_reverse, tangent_by_accumulator), twice_in_reverse),
    **dict.fromkeys(
        (
            function, function_of_unknown_shape, function_of_unknown_rank, xla, recompute,
            saved_model, branch,
        ),
        same,
    ),
    **dict.fromkeys((loop, loop_in_autograph), loop_by_tapes),
    square: square,
    plus_native: plus_native,
    **dict.fromkeys((vectorized_map, map_fn, scan), over_members),
    batch_jacobian: lambda f: over_members(tape(f)),
}  # fmt: skip
OVER_MEMBERS = (vectorized_map, map_fn, scan, batch_jacobian)
STEPS = tuple(step for step in BY_TAPES if step not in OVER_MEMBERS)
# What has found the most.
OFTEN = (
    *4 * [(vectorized_map, tape)], *2 * [(tape, tape)], *2 * [(tape, vectorized_map)],
    *2 * [(vectorized_map, tape, tape)], (tape, tape, tape), (function, tape), (tape, accumulator),
    (accumulator,), (vectorized_map,), (tape,), (batch_jacobian, function),
    (pullback_by_accumulator, tape), (pullback_by_accumulator, accumulator),
    (accumulator, pullback_by_accumulator), 2 * (pullback_by_accumulator,),
    (twice_in_reverse, pullback_by_accumulator), (tape, twice_in_reverse), (tape, tangent_by_tape),
    (tape, pullback_by_accumulator),
)  # fmt: skip
