"""What programs are made of: functions, ways to write their rules, forms and transformations.

Each piece stands on its own, so that a program is printed as the text of its pieces. A
transformation `t` of functions comes with `t_by_tapes`, which says what it means by eager tapes and
Python's loops alone; where it means nothing, there is none.
"""

import concurrent.futures
import functools
import tempfile

import numpy as np
import tensorflow as tf

import sgtrick

# Functions of a point with any number of dimensions, or of one. Their Jacobian `R + D`, what
# multiplies it from both sides, and the same in NumPy.


def conj(t):
    return tf.math.conj(t) if t.dtype.is_complex else t


class Asinh:
    """Entry by entry."""

    ranks = (0, 1, 2)

    @staticmethod
    def true(x):
        return tf.asinh(x)

    @staticmethod
    def jacobian(x):
        return (1 + x**2) ** -0.5

    @staticmethod
    def pull(j, u):
        return conj(j) * u

    @staticmethod
    def push(j, t):
        return j * t

    @staticmethod
    def engine(x):
        return np.arcsinh(x), (1 + x**2) ** -0.5


class Sum:
    """To a number."""

    ranks = (0, 1, 2)

    @staticmethod
    def true(x):
        return tf.reduce_sum(tf.sin(x))

    @staticmethod
    def jacobian(x):
        return tf.cos(x)

    @staticmethod
    def pull(j, u):
        return conj(j) * u

    @staticmethod
    def push(j, t):
        return tf.reduce_sum(j * t)

    @staticmethod
    def engine(x):
        return np.sin(x).sum(), np.cos(x)


class LogSoftmax:
    """With a Jacobian that is full, and not symmetric."""

    ranks = (1,)

    @staticmethod
    def true(x):
        return tf.nn.log_softmax(x)

    @staticmethod
    def jacobian(x):
        return tf.eye(tf.size(x), dtype=x.dtype) - tf.nn.softmax(x)

    @staticmethod
    def pull(j, u):
        return tf.linalg.matvec(j, u, transpose_a=True)

    @staticmethod
    def push(j, t):
        return tf.linalg.matvec(j, t)


class Logdet:
    """Linear algebra: of a matrix to a number."""

    ranks = (2,)

    @staticmethod
    def true(x):
        return tf.linalg.logdet(
            tf.matmul(x, x, transpose_a=True) + 3 * tf.eye(x.shape[1], dtype=x.dtype)
        )

    @staticmethod
    def jacobian(x):
        a = tf.matmul(x, x, transpose_a=True) + 3 * tf.eye(x.shape[1], dtype=x.dtype)
        return 2 * tf.matmul(x, tf.linalg.inv(a))

    @staticmethod
    def pull(j, u):
        return j * u

    @staticmethod
    def push(j, t):
        return tf.reduce_sum(j * t)

    @staticmethod
    def engine(x):
        a = x.T @ x + 3 * np.eye(x.shape[1], dtype=x.dtype)
        return np.linalg.slogdet(a)[1].astype(x.dtype), 2 * x @ np.linalg.inv(a)


FUNCTIONS = (Asinh, Sum, LogSoftmax, Logdet)

# Ways to compute the Jacobian of a function in a rule.


def closed_form(function, x):
    return function.jacobian(x)


def stopped(function, x):
    return tf.stop_gradient(function.jacobian(x))


def on_host(function, x):
    j = function.jacobian(x)
    y = tf.numpy_function(lambda j: j + 0, [j], j.dtype, stateful=False)
    y.set_shape(j.shape)
    return y


def in_a_loop(function, x):
    j = function.jacobian(x)
    return tf.while_loop(
        lambda i, _: i < 2, lambda i, s: (i + 1, s + j / 2), (0, tf.zeros_like(j))
    )[1]


def in_a_branch(function, x):
    return tf.cond(
        tf.reduce_sum(x) > -1e9, lambda: function.jacobian(x), lambda: 0 * function.jacobian(x)
    )


def in_a_function(function, x):
    return tf.function(function.jacobian)(x)


def by_a_tape(function, x):
    """Of the Jacobian's own antiderivative, entry by entry."""
    j = function.jacobian(x)
    with tf.GradientTape() as tape:
        tape.watch(j)
        y = j**2 / 2
    return tape.gradient(y, j)


def by_another_form(function, x):
    identity = sgtrick.custom_vjp(lambda a: (2 * a - a, lambda u: u))
    return identity(function.jacobian(x))


def by_a_mapped_form(function, x):
    square = sgtrick.custom_vjp(lambda a: (a**2, lambda u: 2 * a * u))
    j = function.jacobian(x)
    squares = tf.vectorized_map(square, tf.reshape(j, [-1]))
    return j + tf.reshape(squares - tf.reshape(j, [-1]) ** 2, tf.shape(j))


def with_a_variable(function, x):
    return function.jacobian(x) * tf.cast(ONE, x.dtype)


ONE = tf.Variable(1.0, trainable=False)

OF_COMPLEX = (closed_form, stopped, on_host, in_a_loop, in_a_function, with_a_variable)
RULES = (
    closed_form, stopped, on_host, in_a_loop, in_a_branch, in_a_function, by_a_tape,
    by_another_form, by_a_mapped_form, with_a_variable,
)  # fmt: skip

# Forms, on computations of the value that have twice its derivative.


def misled(function, x):
    return function.true(2 * x - tf.stop_gradient(x))


def with_gradient(function, rule):
    return sgtrick.with_gradient(lambda x: misled(function, x), lambda x: rule(function, x))


def with_gradient_in_part(function, rule):
    """The other argument keeps autodiff, and is made of x as well."""

    @sgtrick.with_gradient(grad=lambda x, scale: rule(function, x) * scale)
    def form(x, scale):
        return misled(function, x) * scale

    return lambda x: form(x, tf.exp(tf.reduce_mean(x))) * tf.exp(-tf.reduce_mean(x))


def from_value_and_gradient(function, rule):
    return sgtrick.from_value_and_gradient(lambda x: (misled(function, x), rule(function, x)))


def custom_jvp(function, rule):
    form = sgtrick.custom_jvp(lambda x: misled(function, x))

    @form.defjvp
    def _(primals, tangents):
        return None, function.push(rule(function, primals[0]), tangents[0])

    return form


def custom_vjp(function, rule):
    @sgtrick.custom_vjp
    def form(x):
        return misled(function, x), lambda u: function.pull(rule(function, x), u)

    return form


def custom_vjp_of_structures(function, rule):
    @sgtrick.custom_vjp
    def form(point, *, number):
        def grad_fn(u, _, v):
            return {"x": function.pull(rule(function, point["x"]), u), "z": v * number}, None

        return (misled(function, point["x"]), tf.constant(7), point["z"] * number), grad_fn

    def run(x):
        y, seven, z = form({"x": x, "z": tf.reduce_sum(x)}, number=tf.constant(2.0, x.dtype))
        return y + (z - 2 * tf.reduce_sum(x)) * tf.cast(seven, x.dtype)

    return run


def custom_vjp_that_clips(function, rule):
    """Not linear in the upstream gradient, as far out as nobody goes."""

    @sgtrick.custom_vjp
    def form(x):
        def grad_fn(u):
            return function.pull(rule(function, x), tf.clip_by_value(u, -1e6, 1e6))

        return misled(function, x), grad_fn

    return form


def custom_vjp_on_host(function, rule):
    """Which cannot be transposed."""

    @sgtrick.custom_vjp
    def form(x):
        def grad_fn(u):
            v = tf.numpy_function(lambda u: u + 0, [u], u.dtype, stateful=False)
            v.set_shape(u.shape)
            return function.pull(rule(function, x), v)

        return misled(function, x), grad_fn

    return form


class Scaled:
    """Of which each object has a scale of its own."""

    def __init__(self, function, rule, scale):
        self.function, self.rule, self.scale = function, rule, scale

    @sgtrick.custom_jvp
    def by_jvp(self, x):
        return misled(self.function, x) * self.scale

    @by_jvp.defjvp
    def _(self, primals, tangents):
        j = self.rule(self.function, primals[0]) * self.scale
        return None, self.function.push(j, tangents[0])


def custom_jvp_of_objects(function, rule):
    """Of which the one was called before the other."""

    def run(x):
        once, thrice = Scaled(function, rule, 1), Scaled(function, rule, 3)
        return (thrice.by_jvp(x) - once.by_jvp(x)) / 2

    return run


def custom_jvp_of_structures(function, rule):
    @sgtrick.custom_jvp
    def form(point, shift):
        x, (y, _) = point["x"], point["rest"]
        return {"f": misled(function, x) + shift, "y": y * 2}

    @form.defjvp
    def _(primals, tangents):
        (point, _), (tangent, _) = primals, tangents
        t = function.push(rule(function, point["x"]), tangent["x"])
        return None, {"f": t, "y": tangent["rest"][0] * 2}

    def run(x):
        total = tf.reduce_sum(x)
        shift = tf.constant(1.0, x.dtype)
        found = form({"x": x, "rest": (total, tf.constant(3))}, shift=shift)
        return found["f"] - 1 + (found["y"] - 2 * total)

    return run


def with_gradient_by_keyword(function, rule):
    """Of a tuple, passed by its name, beside a dict that keeps autodiff."""

    @sgtrick.with_gradient(
        grad=lambda other, point: (rule(function, point[0]), None), argnums="point"
    )
    def form(other, point):
        return misled(function, point[0]) + other["shift"]

    def run(x):
        shift = tf.reduce_sum(tf.sin(x))
        return form({"shift": shift}, point=(x, tf.constant(3))) - shift

    return run


def custom_gradient(function, rule):
    return lambda x: sgtrick.custom_gradient(misled(function, x), rule(function, x), x)


def from_numpy(function, rule):
    del rule

    def run(x):
        ndims = 0 if function is Asinh else x.shape.rank
        return sgtrick.from_numpy(function.engine, event_ndims=ndims)(x)

    return run


FORMS = (
    with_gradient, with_gradient_in_part, from_value_and_gradient, custom_jvp, custom_vjp,
    custom_vjp_of_structures, custom_vjp_that_clips, custom_vjp_on_host, custom_jvp_of_objects,
    custom_jvp_of_structures, with_gradient_by_keyword, custom_gradient, from_numpy,
)  # fmt: skip

# Transformations.


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


def persistent_tape(f):
    def run(x):
        with tf.GradientTape(persistent=True) as t:
            t.watch(x)
            y = f(x)
            g = t.gradient(y, x, weights(y))
            z = y + 1
        return (g + t.gradient(z, x, weights(y))) / 2

    return run


persistent_tape_by_tapes = tape


def jacobian(f):
    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = f(x)
        j = t.jacobian(y, x)
        return tf.tensordot(weights(y), j, y.shape.rank)

    return run


jacobian_by_tapes = tape


def accumulator(f):
    def run(x):
        with tf.autodiff.ForwardAccumulator(x, 1 + weights(x)) as a:
            y = f(x)
        return a.jvp(y)

    return run


def accumulator_by_tapes(f):
    """Twice in reverse: the pullback is linear, and its transpose is the pushforward."""

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


def unrelated_tape(f):
    """That watches, and is asked for something else."""

    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = f(x)
            z = tf.sin(x)
        return y + 0 * tf.reduce_sum(t.gradient(z, x))

    return run


def unrelated_tape_by_tapes(f):
    return f


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


def thread(f):
    def run(x):
        if not tf.executing_eagerly():
            raise NotImplementedError("another thread does not know of the graph")
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(f, x).result()

    return run


thread_by_tapes = function_by_tapes


def replica(f):
    def run(x):
        return tf.distribute.OneDeviceStrategy("CPU:0").run(f, (x,))

    return run


replica_by_tapes = function_by_tapes


def saved_model(f):
    """Stored with gradients, and loaded."""

    def run(x):
        module = tf.Module()
        module.one = ONE
        module.f = tf.function(f, input_signature=[tf.TensorSpec(x.shape, x.dtype)])
        with tempfile.TemporaryDirectory() as folder:
            options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
            tf.saved_model.save(module, folder, options=options)
            return tf.saved_model.load(folder).f(x)

    return run


saved_model_by_tapes = function_by_tapes


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


def branch(f):
    return lambda x: tf.cond(tf.reduce_sum(x) > -1e9, lambda: f(x), lambda: f(2 * x))


def branch_by_tapes(f):
    return f


def square(f):
    return lambda x: f(x) ** 2


square_by_tapes = square


def plus_native(f):
    return lambda x: f(x) + tf.reduce_sum(tf.sin(x))


plus_native_by_tapes = plus_native


def at_a_scaled_point(f):
    return lambda x: f(tf.sin(x) * 2)


at_a_scaled_point_by_tapes = at_a_scaled_point


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


def dataset(f):
    """Only forward."""

    def run(x):
        if not tf.executing_eagerly():
            raise NotImplementedError("a loop over a dataset of unknown length")
        return tf.stack(list(tf.data.Dataset.from_tensor_slices(x).map(f)))

    return run


dataset_by_tapes = vectorized_map_by_tapes


def batch_jacobian(f):
    def run(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = tf.vectorized_map(f, x)
        j = t.batch_jacobian(y, x)
        n = y.shape.rank - 1
        w = weights(y[0])
        return tf.stack([tf.tensordot(w, j_i, n) for j_i in tf.unstack(j)])

    return run


def batch_jacobian_by_tapes(f):
    return vectorized_map_by_tapes(tape(f))


STEPS = (
    tape, persistent_tape, jacobian, accumulator, unrelated_tape, function,
    function_of_unknown_shape, function_of_unknown_rank, at_a_variable, xla, recompute, thread, replica, saved_model, loop, branch, square,
    plus_native, at_a_scaled_point,
)  # fmt: skip
OVER_MEMBERS = (vectorized_map, map_fn, scan, dataset, batch_jacobian)


@functools.cache
def by_tapes(step):
    return globals()[f"{step.__name__}_by_tapes"]
