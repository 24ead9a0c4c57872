"""Ways to compute the Jacobian of a function in a rule."""

import tensorflow as tf

import sgtrick
from fuzz.pieces.functions import conj


def closed_form(function, x):
    return function.jacobian(x)


def stopped(function, x):
    return tf.stop_gradient(function.jacobian(x))


def copied_by_host(j):
    y = tf.numpy_function(lambda j: j + 0, [j], j.dtype, stateful=False)
    y.set_shape(j.shape)
    return y


def on_host(function, x):
    return copied_by_host(function.jacobian(x))


def in_part_on_host(function, x):
    j = function.jacobian(x)
    return (j + copied_by_host(j)) / 2


def by_members(function, x, copied=tf.identity):
    j = function.jacobian(x)
    return tf.reshape(tf.map_fn(copied, tf.reshape(j, [-1])), tf.shape(j))


def by_members_on_host(function, x):
    return by_members(function, x, copied_by_host)


def in_a_loop(function, x):
    j = function.jacobian(x)
    return tf.while_loop(
        lambda i, _: i < 2, lambda i, s: (i + 1, s + j / 2), (0, tf.zeros_like(j))
    )[1]


def is_near(x):
    return tf.reduce_sum(tf.abs(x)) < 1e4


def in_a_branch(function, x):
    return tf.cond(is_near(x), lambda: function.jacobian(x), lambda: 0 * function.jacobian(x))


def in_a_function(function, x):
    return tf.function(function.jacobian)(x)


def by_a_tape(function, x):
    """Of the Jacobian's own antiderivative, entry by entry."""
    j = function.jacobian(x)
    with tf.GradientTape() as tape:
        tape.watch(j)
        y = j**2 / 2
    return conj(tape.gradient(y, j))


def by_another_form(function, x):
    identity = sgtrick.custom_vjp(lambda a: (2 * a - a, lambda u: u))
    return identity(function.jacobian(x))


def by_a_mapped_form(function, x):
    square = sgtrick.custom_vjp(lambda a: (a**2, lambda u: conj(2 * a) * u))
    j = function.jacobian(x)
    squares = tf.vectorized_map(square, tf.reshape(j, [-1]))
    return j + tf.reshape(squares - tf.reshape(j, [-1]) ** 2, tf.shape(j))


def by_a_form_that_closes_over_it(function, x):
    """And is called in a function of its own."""
    j = function.jacobian(x)
    times = sgtrick.with_gradient(lambda a: a * j, lambda a: tf.ones_like(a) * j)
    return tf.function(times)(tf.ones_like(j))


def with_a_variable(function, x):
    return function.jacobian(x) * tf.cast(ONE, x.dtype)


ONE = tf.Variable(1.0, trainable=False)

RULES = (
    closed_form, stopped, on_host, in_part_on_host, by_members, by_members_on_host, in_a_loop,
    in_a_branch, in_a_function, by_a_tape, by_another_form, by_a_mapped_form,
    by_a_form_that_closes_over_it, with_a_variable,
)  # fmt: skip
# Which call a `tf.function`.
CALLING_FUNCTIONS = (in_a_function, by_a_mapped_form, by_a_form_that_closes_over_it)
# Whose derivative TensorFlow loses, in whole or in part.
LOSING = (stopped, on_host, in_part_on_host, by_members_on_host)
