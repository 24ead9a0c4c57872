"""Forms, on computations of the value that have twice its derivative."""

import tensorflow as tf

import sgtrick
from fuzz.pieces.functions import Asinh, conj, hessian, hessian_times
from fuzz.pieces.rules import copied_by_host, is_near


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


def with_gradient_closing_over_a_scale(function, rule, value=misled):
    def run(x):
        scale = tf.exp(tf.reduce_mean(x))

        @sgtrick.with_gradient(grad=lambda x: rule(function, x) * scale)
        def form(x):
            return value(function, x) * scale

        return form(x) / scale

    return run


def with_gradient_of_one_tensor_twice(function, rule):
    """The other argument keeps autodiff."""

    @sgtrick.with_gradient(grad=lambda x, z: rule(function, x) * tf.exp(tf.reduce_mean(z)))
    def form(x, z):
        return misled(function, x) * tf.exp(tf.reduce_mean(z))

    return lambda x: form(x, x) * tf.exp(-tf.reduce_mean(x))


def misled_only_in_eager(function, x):
    """As code that looks at numbers: nobody can trace it."""
    x.numpy()
    return misled(function, x)


def with_gradient_only_in_eager(function, rule):
    return with_gradient_closing_over_a_scale(function, rule, value=misled_only_in_eager)


def from_value_and_gradient(function, rule):
    return sgtrick.from_value_and_gradient(lambda x: (misled(function, x), rule(function, x)))


def from_value_and_gradient_with_aux(function, rule):
    """By its second argument; the first keeps autodiff."""

    @sgtrick.from_value_and_gradient(argnums=(1,), has_aux=True)
    def form(scale, x):
        aux = tf.size(x), tf.reduce_sum(x)
        return (misled(function, x) * scale, aux), (rule(function, x) * scale,)

    def run(x):
        scale = tf.exp(tf.reduce_mean(x))
        y, (n, total) = form(scale, x)
        y += tf.stop_gradient(total - tf.reduce_sum(x))
        return y * tf.cast(n + 1, x.dtype) / tf.cast(tf.size(x) + 1, x.dtype) / scale

    return run


def from_value_and_gradient_closing_over_a_scale(function, rule):
    def run(x):
        scale = tf.exp(tf.reduce_mean(x))
        form = sgtrick.from_value_and_gradient(
            lambda x: (misled(function, x) * scale, rule(function, x) * scale)
        )
        return form(x) / scale

    return run


def custom_jvp(function, rule, passed_on=tf.identity):
    form = sgtrick.custom_jvp(lambda x: misled(function, x))

    @form.defjvp
    def _(primals, tangents):
        return None, function.push(rule(function, primals[0]), passed_on(tangents[0]))

    return form


def custom_vjp(function, rule, passed_on=tf.identity):
    @sgtrick.custom_vjp
    def form(x):
        return misled(function, x), lambda u: function.pull(rule(function, x), passed_on(u))

    return form


def custom_vjp_closing_over_a_scale(function, rule):
    """Which has no derivative with respect to it: it is not made of the argument."""

    def run(x):
        scale = tf.exp(tf.reduce_mean(x))

        @sgtrick.custom_vjp
        def form(x):
            return (
                misled(function, x) * scale,
                lambda u: function.pull(rule(function, x), u * conj(scale)),
            )

        return form(x + 0) / scale

    return run


def custom_jvp_on_host(function, rule):
    """Which cannot be transposed."""
    return custom_jvp(function, rule, copied_by_host)


def custom_vjp_on_host(function, rule):
    """Which cannot be transposed."""
    return custom_vjp(function, rule, copied_by_host)


def custom_gradient(function, rule):
    return lambda x: sgtrick.custom_gradient(misled(function, x), rule(function, x), x)


def custom_gradient_stopped_by_hand(function, rule, hx_of=None):
    """Another tensor, which is made of x as well, keeps autodiff."""

    def run(x):
        at, scale = tf.stop_gradient(x), tf.exp(tf.reduce_mean(x))
        y, j = misled(function, at) * scale, rule(function, at) * scale
        hx = hx_of and hx_of(function, at) * scale
        return sgtrick.custom_gradient(y, j, x, fx_gx_manually_stopped=True, hx=hx) / scale

    return run


def custom_gradient_with_hx_stopped_by_hand(function, rule):
    return custom_gradient_stopped_by_hand(function, rule, hessian)


def from_numpy(function, rule, **options):
    del rule

    def run(x):
        ndims = 0 if function is Asinh else x.shape.rank
        return sgtrick.from_numpy(function.engine, event_ndims=ndims, **options)(x)

    return run


def from_numpy_with_hessp(function, rule):
    return from_numpy(function, rule, hessp=function.hessp)


def custom_gradient_with_hx(function, rule, hx_of=hessian):
    def run(x):
        value, hx = misled(function, x), hx_of(function, x)
        return sgtrick.custom_gradient(value, rule(function, x), x, hx=hx, device="CPU:0")

    return run


def custom_gradient_with_a_function_hx(function, rule):
    return custom_gradient_with_hx(
        function, rule, lambda function, x: lambda v: hessian_times(function, x, v)
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
        y = tf.cond(is_near(x), lambda: form(x), lambda: form(2 * x))
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
    """Of equations with a rule of its own in them, two for each entry: each row is a system."""
    form = custom_vjp(function, rule)

    def run(x):
        root = misled(function, x)
        rank = root.shape.rank or 0

        def residual(roots, x):
            y, z = roots
            r = (y - form(x)) * (2 + tf.sin(y))
            return r + tf.cumsum(r, -1) / 2 if rank else r, (z - y) * (2 + tf.cos(z))

        return sgtrick.implicit_root(residual, (root, root), x, batch_ndims=max(rank - 1, 0))[1]

    return run


def clip_gradient(function, rule):
    """As far out as nobody goes."""
    return lambda x: sgtrick.clip_gradient(custom_vjp(function, rule)(x), -1e6, 1e6)


def magic_box(function, rule):
    """The logarithm of an estimate of `exp(f)`."""

    def run(x):
        y = custom_vjp(function, rule)(x)
        return tf.math.log(tf.stop_gradient(tf.exp(y)) * sgtrick.magic_box(y))

    return run


FORMS = (
    with_gradient, with_gradient_in_part,
    with_gradient_of_one_tensor_twice,
    with_gradient_closing_over_a_scale,
    with_gradient_only_in_eager,
    from_value_and_gradient, from_value_and_gradient_with_aux,
    from_value_and_gradient_closing_over_a_scale, custom_jvp, custom_vjp, custom_vjp_on_host,
    custom_jvp_on_host, custom_vjp_of_a_variable,
    custom_gradient, custom_gradient_with_hx, custom_gradient_with_a_function_hx,
    custom_gradient_stopped_by_hand, custom_gradient_with_hx_stopped_by_hand, from_numpy,
    from_numpy_with_hessp, custom_vjp_in_a_function,
    custom_vjp_closing_over_a_scale, with_gradient_in_a_branch,
    implicit_root, clip_gradient,
    magic_box,
)  # fmt: skip
# Which there are only of functions to a number and of those entry by entry.
ENGINES = (from_numpy, from_numpy_with_hessp)
# Which there are not of complex numbers.
OF_REAL = (
    *ENGINES,
    implicit_root,
    clip_gradient, magic_box,
)  # fmt: skip
# Whose gradient has another connection: beside it, a Jacobian that is stopped is meant to be so.
CONNECTED = (
    with_gradient_in_part, with_gradient_of_one_tensor_twice,
    with_gradient_closing_over_a_scale,
    with_gradient_only_in_eager, from_value_and_gradient_with_aux,
    from_value_and_gradient_closing_over_a_scale, custom_vjp_closing_over_a_scale,
    custom_vjp_of_a_variable, custom_gradient_stopped_by_hand, with_gradient_in_a_branch,
)  # fmt: skip
# Whose rule closes over a Jacobian that was computed before: what it lost there, no rule can tell.
GIVEN_A_JACOBIAN = (custom_vjp_in_a_function,)
