"""Transformations of functions.

Each transformation `t` comes with `t_by_tapes`, which says what it means by eager tapes and Python's
loops alone; where it means nothing, there is none.
"""

import functools
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


tape_by_tapes = tape


def jacobian(f):
    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = f(x)
        j = t.jacobian(y, x)
        return tf.tensordot(weights(y), j, y.shape.rank)

    return run


jacobian_by_tapes = tape


def symbolic(f):
    """By `tf.gradients`."""

    @tf.function
    def run(x):
        y = f(x)
        return tf.gradients(y, x, weights(y))[0]

    return run


symbolic_by_tapes = tape


def graph_and_session(f):
    """Only outside of all others, as of the first version of TensorFlow."""

    def run(x):
        if not tf.executing_eagerly():
            raise NotImplementedError("a graph of its own")
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            point = tf.compat.v1.placeholder(x.dtype, x.shape)
            y = f(point)
            (g,) = tf.gradients(y, point, weights(y))
            session.run(tf.compat.v1.global_variables_initializer())
            found = session.run(g, {point: x.numpy()})
        return tf.constant(found)

    return run


graph_and_session_by_tapes = tape


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


twice_in_reverse_by_tapes = accumulator_by_tapes = twice_in_reverse


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


pullback_by_accumulator_by_tapes = tape


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


tangent_by_tape_by_tapes = tape


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


tangent_by_accumulator_by_tapes = twice_in_reverse


def function(f):
    return tf.function(f)


def function_by_tapes(f):
    return f


def function_of_unknown_shape(f):
    def run(x):
        spec = tf.TensorSpec([None] * x.shape.rank, x.dtype)
        return tf.function(f, input_signature=[spec])(x)

    return run


function_of_unknown_shape_by_tapes = function_by_tapes


def function_of_unknown_rank(f):
    def run(x):
        return tf.function(f, input_signature=[tf.TensorSpec(None, x.dtype)])(x)

    return run


function_of_unknown_rank_by_tapes = function_by_tapes


def at_a_variable(f):
    def run(x):
        if not tf.executing_eagerly():
            raise NotImplementedError("a function makes no variables")
        x = tf.Variable(x)
        with tf.GradientTape() as t:
            y = f(x)
        return t.gradient(y, x, weights(y))

    return run


at_a_variable_by_tapes = tape


def xla(f):
    return tf.function(f, jit_compile=True)


xla_by_tapes = function_by_tapes


def recompute(f):
    return tf.recompute_grad(f)


recompute_by_tapes = function_by_tapes


def native_rule(f):
    """In a function with a gradient in TensorFlow's own protocol."""

    @tf.custom_gradient
    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = f(x)
        return y, lambda u: t.gradient(y, x, u)

    return run


native_rule_by_tapes = function_by_tapes


def replicas(f):
    """Two of them, each with a batch of its own."""

    def run(x):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        batches = strategy.experimental_distribute_values_from_function(
            lambda replica: x * (1 + replica.replica_id_in_sync_group / 4)
        )
        return tf.add_n(strategy.experimental_local_results(strategy.run(f, (batches,))))

    return run


def replicas_by_tapes(f):
    return lambda x: f(x) + f(1.25 * x)


def saved_model(f, with_gradients=True):
    """Stored and loaded."""

    def run(x):
        module = tf.Module()
        module.variables_of_pieces = [ONE, SCALE]
        module.f = tf.function(f, input_signature=[tf.TensorSpec(x.shape, x.dtype)])
        with tempfile.TemporaryDirectory() as folder:
            options = tf.saved_model.SaveOptions(experimental_custom_gradients=with_gradients)
            tf.saved_model.save(module, folder, options=options)
            loaded = tf.saved_model.load(folder)  # whose function does not keep its variables
            return loaded.f(x)

    return run


saved_model_by_tapes = function_by_tapes


def saved_model_without_gradients(f):
    return saved_model(f, with_gradients=False)


saved_model_without_gradients_by_tapes = function_by_tapes


def lite(f):
    """Converted for TensorFlow Lite."""

    def run(x):
        if not tf.executing_eagerly():
            raise NotImplementedError("an interpreter of its own")
        module = tf.Module()
        module.variables_of_pieces = [ONE, SCALE]
        module.f = tf.function(f, input_signature=[tf.TensorSpec(x.shape, x.dtype)])
        concrete = [module.f.get_concrete_function()]
        converter = tf.lite.TFLiteConverter.from_concrete_functions(concrete, module)
        ops = tf.lite.OpsSet
        converter.target_spec.supported_ops = [ops.TFLITE_BUILTINS, ops.SELECT_TF_OPS]
        interpreter = tf.lite.Interpreter(model_content=converter.convert())
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
        interpreter.invoke()
        return tf.constant(interpreter.get_tensor(interpreter.get_output_details()[0]["index"]))

    return run


lite_by_tapes = function_by_tapes


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


loop_in_autograph_by_tapes = loop_by_tapes


def branch(f):
    return lambda x: tf.cond(is_near(x), lambda: f(x), lambda: f(2 * x))


def branch_by_tapes(f):
    return f


def square(f):
    return lambda x: f(x) ** 2


square_by_tapes = square


def plus_native(f):
    return lambda x: f(x) + tf.reduce_sum(tf.sin(x))


plus_native_by_tapes = plus_native


# Over the first dimension.


def vectorized_map(f):
    return lambda x: tf.vectorized_map(f, x)


def vectorized_map_by_tapes(f):
    return lambda x: tf.stack([f(row) for row in tf.unstack(x)])


def map_fn(f):
    return lambda x: tf.map_fn(f, x)


map_fn_by_tapes = vectorized_map_by_tapes


def scan(f):
    def run(x):
        return tf.scan(lambda _, row: f(row), x, f(x[0]))

    return run


scan_by_tapes = vectorized_map_by_tapes


def batch_jacobian(f):
    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = tf.vectorized_map(lambda row: tf.reshape(f(row), [-1]), x)
        j = t.batch_jacobian(y, x)
        return tf.stack([tf.tensordot(weights(y[0]), j_i, 1) for j_i in tf.unstack(j)])

    return run


def batch_jacobian_by_tapes(f):
    return vectorized_map_by_tapes(tape(f))


STEPS = (
    tape, jacobian, symbolic, graph_and_session, accumulator, twice_in_reverse,
    pullback_by_accumulator, tangent_by_tape, tangent_by_accumulator,
    function, function_of_unknown_shape, function_of_unknown_rank, at_a_variable,
    xla, recompute, native_rule, replicas, saved_model,
    saved_model_without_gradients, lite, loop, loop_in_autograph, branch, square, plus_native,
)  # fmt: skip
OVER_MEMBERS = (
    vectorized_map, map_fn, scan, batch_jacobian,
)  # fmt: skip
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


@functools.cache
def by_tapes(step):
    return globals()[f"{step.__name__}_by_tapes"]
