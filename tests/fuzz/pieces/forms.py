"""Forms, on computations of the value that have twice its derivative."""

import tensorflow as tf

import sgtrick
from fuzz.pieces.functions import Asinh, conj, hessian, hessian_times


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


def from_numpy_with_hessp(function, rule):
    del rule

    def run(x):
        ndims = 0 if function is Asinh else x.shape.rank
        return sgtrick.from_numpy(function.engine, hessp=function.hessp, event_ndims=ndims)(x)

    return run


def custom_gradient_with_hx(function, rule):
    def run(x):
        value, hx = misled(function, x), hessian(function, x)
        return sgtrick.custom_gradient(value, rule(function, x), x, hx=hx, device="CPU:0")

    return run


def custom_gradient_with_a_function_hx(function, rule):
    def run(x):
        return sgtrick.custom_gradient(
            misled(function, x),
            rule(function, x),
            x,
            hx=lambda v: hessian_times(function, x, v),
        )

    return run


def custom_gradient_without_curvature(function, rule):
    """The identity, of which the Hessian is zero, before a form."""
    form = custom_vjp(function, rule)
    return lambda x: form(
        sgtrick.custom_gradient(x * 1, tf.ones_like(x), x, batch_ndims=x.shape.rank, hx=0)
    )


def custom_vjp_in_a_function(function, rule):
    """Which closes over what was computed outside of the function that it is called in."""

    def run(x):
        j = rule(function, x)
        form = sgtrick.custom_vjp(lambda x: (misled(function, x), lambda u: function.pull(j, u)))
        return tf.function(form)(x)

    return run


def with_gradient_in_a_branch(function, rule):
    """Which closes over what was computed outside of the branch."""

    def run(x):
        scale = tf.exp(tf.reduce_mean(x))
        form = sgtrick.with_gradient(
            lambda x: misled(function, x) * scale, lambda x: rule(function, x) * scale
        )
        y = tf.cond(tf.reduce_sum(x) > -1e9, lambda: form(x), lambda: form(2 * x))
        return y / scale

    return run


SCALE = tf.Variable(1.0)


def custom_vjp_of_a_variable(function, rule):
    @sgtrick.custom_vjp
    def form(x):
        y = misled(function, x)

        def grad_fn(u, variables):
            scale = tf.cast(SCALE, x.dtype)
            by_scale = tf.cast(tf.reduce_sum(u * conj(y)), tf.float32)
            by_others = [by_scale if v is SCALE else None for v in variables]
            return function.pull(rule(function, x) * scale, u), by_others

        return y * tf.cast(SCALE, x.dtype), grad_fn

    return form


# Roots and tricks.


def implicit_root(function, rule):
    """Of an equation with a rule of its own in it."""
    form = custom_vjp(function, rule)

    def run(x):
        root = misled(function, x)
        return sgtrick.implicit_root(
            lambda y, x: (y - form(x)) * (2 + tf.sin(y)), root, x, batch_ndims=root.shape.rank
        )

    return run


def implicit_reparameterize(function, rule):
    form = custom_vjp(function, rule)

    def run(x):
        return sgtrick.implicit_reparameterize(
            lambda y, x: tf.sigmoid((y - form(x)) * (2 + tf.sin(y))), misled(function, x), x
        )

    return run


def straight_through(function, rule):
    return lambda x: sgtrick.straight_through(misled(function, x), custom_vjp(function, rule)(x))


def scale_gradient(function, rule):
    """There and back, by reversing it twice on the way."""
    form = custom_vjp(function, rule)

    def run(x):
        x = sgtrick.reverse_gradient(sgtrick.scale_gradient(x, 2))
        return form(sgtrick.scale_gradient(x, -0.5))

    return run


def clip_gradient(function, rule):
    """As far out as nobody goes."""
    return lambda x: sgtrick.clip_gradient(custom_vjp(function, rule)(x), -1e6, 1e6)


def stop_gradient(function, rule):
    """Of every other entry, and of the rest."""
    form = custom_vjp(function, rule)

    def run(x):
        n = tf.reshape(tf.range(tf.size(x)), tf.shape(x))
        even, odd = tf.equal(n % 2, 0), tf.equal(n % 2, 1)
        some, rest = sgtrick.stop_gradient(x, where=even), sgtrick.stop_gradient(x, where=odd)
        return form(some + rest - tf.stop_gradient(x))

    return run


def magic_box(function, rule):
    """The logarithm of an estimate of `exp(f)`."""

    def run(x):
        y = custom_vjp(function, rule)(x)
        return tf.math.log(tf.stop_gradient(tf.exp(y)) * sgtrick.magic_box(y))

    return run


FORMS = (
    with_gradient, with_gradient_in_part, from_value_and_gradient, custom_jvp, custom_vjp,
    custom_vjp_of_structures, custom_vjp_that_clips, custom_vjp_on_host, custom_jvp_of_objects,
    custom_jvp_of_structures, with_gradient_by_keyword, custom_gradient, from_numpy,
    from_numpy_with_hessp, custom_gradient_with_hx, custom_gradient_with_a_function_hx,
    custom_gradient_without_curvature, custom_vjp_in_a_function, with_gradient_in_a_branch,
    custom_vjp_of_a_variable, implicit_root, implicit_reparameterize, straight_through,
    scale_gradient, clip_gradient, stop_gradient, magic_box,
)  # fmt: skip
# Which reach for what was computed outside, as those do in which most was wrong.
OUTSIDE = (custom_vjp_in_a_function, with_gradient_in_a_branch)
# Which there are not of each function, or not of complex numbers.
OF_FEW = (from_numpy, from_numpy_with_hessp, custom_gradient_with_a_function_hx)
OF_REAL = (
    *OF_FEW, custom_vjp_that_clips, custom_gradient_with_hx, with_gradient_in_a_branch,
    implicit_root, implicit_reparameterize, clip_gradient, magic_box,
)  # fmt: skip
