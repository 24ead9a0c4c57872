"""What JAX's tests of `custom_jvp` and `custom_vjp` ask, asked of ours.

Each test has the name of the case in JAX's tests/custom_api_test.py, as of August 2026. Where JAX
counts on an error that is not needed here, the right number is asserted. `jit` is `tf.function`,
`vmap` is `tf.vectorized_map`, `scan` is a loop, and `remat` is `tf.recompute_grad`.
"""

import concurrent.futures
import copy
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import Way, constant, derivative, gradient, gradients, mapped, pushed, with_jvp

close = np.testing.assert_allclose


def sine(x):
    return tf.sin(x)


def slope_of(rule, f=sine):
    """`custom_jvp` of `f`, with a rule that calls it, as most of JAX's do."""
    h = sgtrick.custom_jvp(f)

    @h.defjvp
    def jvp(primals, tangents):
        return h(*primals), rule(*primals) * tangents[0]

    return h


def twice_cos(x):
    return 2 * tf.cos(x)


def pulled(rule, f=sine):
    """`custom_vjp` of `f` whose rule multiplies by what is computed in the forward pass."""

    @sgtrick.custom_vjp
    def h(x):
        slope = rule(x)
        return f(x), lambda u: u * slope

    return h


# The second derivative at 2 of h(h(x)), where h is the sine and has the derivative 2 cos.
SECOND = -4 * (math.sin(2) * math.cos(math.sin(2)) + 2 * math.cos(2) ** 2 * math.sin(math.sin(2)))


def scanned(f, length=1):
    return lambda x: tf.scan(lambda c, _: f(c), tf.range(length), x)[-1]


WAYS = {
    "grad": Way(),
    "grad of jit": Way(inside=tf.function),
    "jit of grad": Way(around=tf.function),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

MAPS = {
    "vmap": mapped,
    "vmap of jit": lambda f: mapped(tf.function(f)),
    "jit of vmap": lambda f: tf.function(mapped(f)),
}
maps = pytest.mark.parametrize("many", MAPS.values(), ids=MAPS)


class TestCustomJVP:
    def test_basic(self):
        h, x = slope_of(twice_cos), constant(3.0)
        close(h(x), math.sin(3))
        close(pushed(h, x, constant(1.0)), 2 * math.cos(3))
        close(gradient(h, x), 2 * math.cos(3))

    def test_invariance(self):
        h = with_jvp(lambda xs, ts: (h(*xs), 3 * ts[0]), lambda x: tf.cos(2 * x) / 2)
        x = constant(1.0)

        def again(f):
            def value(x):
                with tf.autodiff.ForwardAccumulator(x, x):
                    return f(x)

            return value

        for f in (again(h), again(again(h))):
            close(f(x), math.cos(2) / 2)
            close(pushed(f, x, x), 3)

    def test_deepcopy(self):
        close(gradient(copy.deepcopy(slope_of(twice_cos)), constant(1.0)), 2 * math.cos(1))

    @pytest.mark.parametrize("x", [2.0, -2.0])
    def test_python_control_flow(self, x):
        h = with_jvp(
            lambda primals, tangents: (primals[0], (2 if primals[0] > 0 else 3) * tangents[0]),
            lambda x: tf.sin(x) if x > 0 else tf.cos(x),
        )
        close(h(constant(x)), math.sin(x) if x > 0 else math.cos(x))
        close(gradient(h, constant(x)), 2 if x > 0 else 3)

    def test_vmap(self):
        def scalar(x):
            assert x.shape.rank == 0
            return tf.sin(x)

        h = slope_of(twice_cos, scalar)
        xs = constant([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
        rows, each = mapped(h), mapped(mapped(h))
        push = lambda f: lambda x: pushed(f, x, x)
        close(each(xs), np.sin(xs))
        expected = 2 * np.cos(xs) * xs
        for f in (mapped(mapped(push(h))), push(each), mapped(push(rows))):
            close(f(xs), expected)

    def test_jit(self):
        h, x = slope_of(twice_cos), constant(3.0)
        close(tf.function(tf.function(h))(x), math.sin(3))
        push = lambda f: lambda x: pushed(f, x, x)
        close(tf.function(push(h))(x), 6 * math.cos(3))
        close(push(tf.function(h))(x), 6 * math.cos(3))

    def test_pytrees(self):
        h = with_jvp(
            lambda xs, ts: (h(*xs), {"b": 2 * tf.cos(xs[0]["a"]) * ts[0]["a"]}),
            lambda x: {"b": tf.sin(x["a"])},
        )
        x = constant(3.0)
        close(pushed(lambda x: h({"a": x})["b"], x, x), 6 * math.cos(3))

    def test_kwargs(self):
        h = with_jvp(lambda xs, ts: (h(*xs), ts[2]), lambda x, y, c=1.0: c * (x + y))
        f = lambda c: h(constant(10.0), constant(5.0), c=c) ** 2
        close(pushed(f, constant(2.0), constant(1.0)), 60)

    @ways
    def test_initial_style(self, way):
        h = with_jvp(lambda xs, ts: (h(*xs), 2 * ts[0]), lambda x: 3 * x)
        f = scanned(h)
        close(way(f)(constant(3.0)), 2)

        def second(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                slope = way(f)(x)
            return tape.gradient(slope, x, unconnected_gradients="zero")

        close(second(constant(3.0)), 0)

    @maps
    @pytest.mark.long
    def test_initial_style_vmap(self, many):
        f, x = many(scanned(slope_of(lambda x: 2.0, lambda x: 3 * x))), constant([1.0, 1.0, 1.0])
        close(f(x), [3, 3, 3])
        for way in WAYS.values():
            close(way(f)(x), [2, 2, 2])

    def test_closed_over_tracers_error_message(self):
        def f(x):
            return with_jvp(lambda ys, ts: (x + ys[0], 2 * ts[0]), lambda y: x + y)(constant(1.0))

        close(pushed(f, constant(3.0), constant(1.0)), 1)
        close(gradient(f, constant(3.0)), 1)

    def test_nondiff_argnums(self):
        app = with_jvp(
            lambda f, xs, ts: (app(f, *xs), 3 * ts[0]), lambda f, x: f(x), nondiff_argnums=(0,)
        )
        double = lambda x: 2 * x
        close(app(double, constant(1.0)), 2)
        close(pushed(lambda x: app(double, x), constant(1.0), constant(1.0)), 3)

    def test_nondiff_argnames(self):
        app = with_jvp(
            lambda f, xs, ts: (app(f, *xs), 3 * ts[0]), lambda f, x: f(x), nondiff_argnums="f"
        )
        close(gradient(lambda x: app(lambda y: 2 * y, x), constant(1.0)), 3)

    def test_nondiff_arg_vmap_tracer(self):
        h = with_jvp(
            lambda x, ys, ts: (h(x, *ys), 5 * ts[0]), lambda x, y: x * y, nondiff_argnums=(0,)
        )
        y = constant([3.0])
        f = lambda y: mapped(h)(constant([2.0]), y)
        close(f(y), [6])
        close(pushed(f, y, constant([1.0])), [5])

    def test_nondiff_arg_hiding_jvp_tracer(self):
        def f(x):
            g = with_jvp(
                lambda h, xs, ts: (g(h, *xs), 2 * ts[0]), lambda h, x: h(x), nondiff_argnums=(0,)
            )
            return g(lambda y: x + y, x)

        close(pushed(f, constant(2.0), constant(1.0)), 3)  # 1 by the closure, 2 by the rule
        close(gradient(f, constant(2.0)), 3)

    def test_missing_jvp_rule_error_message(self):
        for use in (lambda f, x: f(x), gradient):
            with pytest.raises(TypeError, match="square has no JVP rule"):
                use(sgtrick.custom_jvp(square), constant(2.0))

    def test_jvp_rule_inconsistent_pytree_structures_error_message(self):
        h = with_jvp(lambda xs, ts: ((xs[0] ** 2,), [2 * xs[0] * ts[0], xs[0]]), lambda x: (x**2,))
        h(constant(2.0))
        with pytest.raises(ValueError, match=r"tangent_out must have the structure of"):
            pushed(lambda x: h(x)[0], constant(2.0), constant(1.0))

    def test_primal_tangent_aval_disagreement_error_message(self):
        h = with_jvp(lambda xs, ts: (xs[0] ** 2, tf.reshape(ts[0], [1])), square)
        h(constant(2.0))
        with pytest.raises(ValueError, match=r"The tangent of square\(...\) has shape \[1\]"):
            pushed(h, constant(2.0), constant(1.0))

    def test_jvp_rule_doesnt_return_pair_error_message(self):
        h = with_jvp(lambda xs, ts: ts[0], square)
        h(constant(2.0))
        with pytest.raises(TypeError, match=r"must return \(primal_out, tangent_out\)"):
            pushed(h, constant(2.0), constant(1.0))

    @pytest.mark.parametrize("out", [lambda x: (x, x), lambda x: tf.zeros([3], x.dtype)])
    def test_jvp_rule_primal_out_type_doesnt_match_primal_error_message(self, out):
        h = with_jvp(lambda xs, ts: (out(*xs), ts[0]))
        with pytest.raises((TypeError, ValueError), match="primal_out"):
            pushed(scanned(h), constant(1.0), constant(1.0))

    @pytest.mark.long
    def test_multiple_rule_invocations(self):
        expit = with_jvp(logistic_rule, lambda x: tf.sigmoid(x))
        f, true = fibonacci(expit), fibonacci(tf.sigmoid)
        close(gradient(f, constant(3.0)), gradient(true, constant(3.0)))
        xs = constant([0.0, 1.0, 2.0])
        close(gradient(mapped(f), xs), derivative(true)(xs))

    def test_hard_stuff2(self):
        h = with_jvp(lambda xs, ts: (h(*xs), ts[0]), lambda x: np.zeros(x.shape, x.dtype.name))
        xs = constant([0.0, 1.0, 2.0])
        close(tf.function(mapped(h))(xs), [0, 0, 0])
        for f in (tf.function(mapped(derivative(h))), tf.function(derivative(mapped(h)))):
            close(f(xs), [1, 1, 1])
        close(gradient(mapped(h), xs), [1, 1, 1])
        close(pushed(mapped(h), xs, tf.ones_like(xs)), [1, 1, 1])

    @pytest.mark.long
    def test_hard_stuff3(self):
        relu = with_jvp(
            lambda xs, ts: (relu(*xs), tf.where(xs[0] > 0, ts[0], tf.zeros_like(ts[0]))),
            lambda x: tf.nn.relu(x),
        )
        f, true = fibonacci(relu), fibonacci(tf.nn.relu)
        xs = constant([-1.0, 1.0, 2.0])
        expected = derivative(true)(xs)
        close(tf.function(mapped(f))(xs), true(xs))
        # TensorFlow maps no gradient of a loop.
        close(tf.function(derivative(mapped(f)))(xs), expected)
        close(pushed(tf.function(mapped(f)), xs, tf.ones_like(xs)), expected)

    def test_eval_shape(self):
        expit = with_jvp(logistic_rule, lambda x: tf.sigmoid(x))
        spec = tf.TensorSpec([2, 3])
        for f in (expit, derivative(expit)):
            assert tf.function(f).get_concrete_function(spec).structured_outputs.shape == [2, 3]

    def test_jaxpr_zeros(self):
        dot = with_jvp(
            lambda ps, ts: (dot(*ps), matvec(ps[0], ts[1]) + matvec(ts[0], ps[1])), matvec
        )
        eye, ones = tf.eye(3, dtype=tf.float64), tf.ones([3], tf.float64)
        f = lambda theta: scanned(lambda q: q + dot(eye, ones * theta)[0], 4)(constant(0.0))
        close(gradient(f, constant(1.0)), 4)

    def test_linear_in_scan(self):
        h = with_jvp(lambda xs, ts: (h(*xs), h(*ts)), lambda x: -x)
        close(gradient(scanned(h), constant(3.0)), -1)

    def test_custom_jvps_first_rule_is_none(self):
        h = with_jvp(
            lambda x, ys, ts: (h(x, *ys), 2 * x * ys[0] * ts[0]),
            lambda x, y: x**2 * y,
            nondiff_argnums=(0,),
        )
        close(gradient(lambda y: h(constant(2.0), y), constant(3.0)), 12)

    def test_concurrent_initial_style(self):
        expit = with_jvp(logistic_rule, lambda x: tf.sigmoid(x))

        def run(_):
            xs = constant([1.0, 2.0])
            return gradient(lambda p: tf.reduce_sum(tf.map_fn(lambda x: expit(p * x), xs)), xs[0])

        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            for found in threads.map(run, range(4)):
                close(found, run(0))

    def test_nondiff_argnums_vmap_tracer(self):
        def sample(shape, low, seed):
            return tf.random.stateless_uniform(shape, seed, low, 3.0, tf.float64)

        h = with_jvp(
            lambda shape, seed, ps, ts: (h(shape, *ps, seed), h(shape, *ps, seed) * ts[0]),
            sample,
            nondiff_argnums=(0, 2),
        )
        seeds = tf.constant([[1, 2], [3, 4]])
        low = constant(1.0)
        assert mapped_with_loops(lambda seed: h((2, 3), low, seed), seeds).shape == [2, 2, 3]
        close(pushed(lambda p: h((2, 3), p, seeds[0]), low, low), sample((2, 3), low, seeds[0]))

    def test_fun_with_nested_calls_2(self):
        def call(f, *args):
            return with_jvp(lambda xs, ts: (f(*xs), sum(ts)), f)(*args)

        def nested(x):
            def bar(y):
                def baz(w):
                    q = call(lambda x: y + 0 * x, x)
                    q += call(lambda y: w + y, y)
                    return call(lambda w: call(tf.sin, x) * y + 0 * w, constant(1.0)) + q

                return tf.function(baz)(x)

            return call(bar, x)

        x = constant([1.0, 3.0])
        close(tf.function(nested)(x), nested(x))
        close(mapped(nested)(x), nested(x))

    def test_closure_with_vmap(self):
        alpha = constant(2.0)

        def sample(seed):
            draw = lambda a: tf.random.stateless_gamma([], seed, a, dtype=tf.float64)
            rule = lambda a, t: (
                draw(*a),
                tf.raw_ops.RandomGammaGrad(alpha=a[0], sample=draw(*a)) * t[0],
            )
            return with_jvp(rule, draw)(alpha)

        seeds = tf.constant([[1, 2], [3, 4]])
        found = mapped_with_loops(sample, seeds)
        close(found, [tf.random.stateless_gamma([], s, alpha, dtype=tf.float64) for s in seeds])

    @pytest.mark.long
    def test_closure_with_vmap2(self):
        def h(z):
            def f(x):
                return with_jvp(lambda ys, ts: (x * ys[0], x * ts[0]), lambda y: x * y)(z)

            return mapped(f)(constant([0.0, 1.0, 2.0]))

        close(pushed(h, constant(1.0), constant(2.0)), [0, 2, 4])

    @pytest.mark.parametrize(
        "f", [lambda h: h, lambda h: scanned_pair(h)], ids=["", "initial_style"]
    )
    def test_float0(self, f):
        h = with_jvp(lambda ps, ts: (ps, (2 * ts[0], None)), lambda x, y: (x, y))
        x, y = constant(2.0), tf.constant(3)
        assert f(h)(x, y)[1] == 3
        close(pushed(lambda x: f(h)(x, y)[0], x, constant(1.0)), 2)

    def test_remat(self):
        h, x = slope_of(twice_cos), constant(2.0)
        g = tf.recompute_grad(lambda x: h(h(x)))
        close(g(x), math.sin(math.sin(2)))
        close(gradient(g, x), 4 * math.cos(2) * math.cos(math.sin(2)))

    def test_remat_higher_order(self):
        h, x = slope_of(twice_cos), constant(2.0)
        g = lambda x: h(h(x))
        close(derivative(derivative(tf.recompute_grad(g)))(x), SECOND)

    @maps
    @pytest.mark.long
    def test_initial_style_vmap_2(self, many):
        y = constant([1.0, 2.0, 3.0])
        h = slope_of(lambda x: 2.0, lambda x: 3 * x * tf.reduce_sum(y))
        f, x = many(scanned(h)), constant([1.0, 1.0, 1.0])
        close(f(x), [18, 18, 18])
        close(gradient(f, x), [2, 2, 2])

    @pytest.mark.long
    def test_custom_jvp_vmap_broadcasting_interaction(self):
        add = with_jvp(
            lambda ps, ts: (
                add(*ps),
                sum(t * tf.exp(p - add(*ps)) for p, t in zip(ps, ts, strict=True)),
            ),
            lambda a, b: tf.math.log(tf.exp(a) + tf.exp(b)),
        )
        y = tf.ones([3, 2], tf.float64)
        f = lambda z: tf.reduce_sum(mapped(lambda y: add(z, tf.reduce_sum(y) + z))(y))
        close(gradient(f, constant(0.1)), 3)

    @pytest.mark.long
    def test_custom_jvp_vmap_broadcasting_interaction_2(self):
        transform = with_jvp(
            lambda ps, ts: (transform(*ps), ts[1] + transform(ts[0], ps[1])), lambda box, r: box * r
        )
        r = constant(np.random.default_rng(0).random((5, 2)))

        def energy(box):
            pair = lambda a, b: transform(box, a - b)
            many = mapped(lambda a: mapped(lambda b: pair(a, b))(r))
            return tf.reduce_sum(many(r) ** 2)

        close(gradient(energy, constant(1.0)), 2 * energy(constant(1.0)))

    @pytest.mark.long
    def test_custom_jvp_implicit_broadcasting(self):
        def project(x):
            u = tf.sort(x, direction="DESCENDING")
            excess = tf.cumsum(u) - 1
            count = tf.reduce_sum(tf.cast(u > excess / tf.range(1.0, 6.0), tf.int32))
            return tf.nn.relu(x - tf.gather(excess, count - 1) / tf.cast(count, x.dtype))

        h = sgtrick.custom_jvp(project)

        @h.defjvp
        def jvp(primals, tangents):
            y = h(*primals)
            inside = tf.cast(y > 0, y.dtype)
            mean = tf.tensordot(inside, tangents[0], 1) / tf.reduce_sum(inside)
            return y, inside * (tangents[0] - mean)

        xs = tf.constant(np.random.default_rng(0).random((4, 5)), tf.float32)
        x = xs[0]
        inside = tf.cast(project(x) > 0, tf.float32)
        expected = np.diag(inside) - np.outer(inside, inside) / np.sum(inside)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x)
        close(tape.jacobian(y, x), expected, atol=1e-6)
        close([pushed(h, x, t) for t in tf.eye(5)], expected, atol=1e-6)
        close(
            gradient(lambda x: mapped(h)(x) ** 2, xs),
            gradient(lambda x: mapped(project)(x) ** 2, xs),
            rtol=1e-5,
            atol=1e-6,
        )

    def test_vmap_inside_defjvp(self):
        weights = constant([1.0, 2.0])
        h = with_jvp(
            lambda ps, ts: (h(*ps), tf.reduce_sum(mapped(lambda w: w * ts[0] / ps[1])(weights), 0)),
            lambda m, a: tf.ones_like(m) / 3,
        )
        m = tf.ones([2, 3], tf.float64)
        close(gradient(lambda m: h(m, constant(0.5)), m), tf.fill([2, 3], 6.0))

    def test_custom_jvp_unbroadcasting(self):
        a = constant([1.0, 1.0])
        h = with_jvp(lambda xs, ts: (a * xs[0], a * ts[0]), lambda x: a * x)
        found = gradient(h, constant(1.0))
        assert found.shape == []
        close(found, 2)

    def test_sinc_constant_function_batching(self):
        sinc = slope_of(lambda x: tf.cos(x) / x - tf.sin(x) / x**2, lambda x: tf.sin(x) / x)
        xs = tf.reshape(tf.range(1.0, 7.0, dtype=tf.float64), [3, 2])
        f = lambda p: mapped(lambda row: tf.map_fn(sinc, row))(p * xs)
        expected = gradient(lambda p: tf.sin(p * xs) / (p * xs), constant(0.1))
        close(gradient(f, constant(0.1)), expected)

    def test_custom_jvp_functools_partial(self):
        f = functools.partial(lambda x, y, a: x + y * a, a=0.1)
        h = with_jvp(lambda ps, ts: (f(*ps), ts[0] + 0.1 * ts[1]), f)
        close(gradients(h, constant(1.0), constant(2.0)), [1, 0.1])

    def test_run_rules_more_than_once(self):
        h = with_jvp(lambda ps, ts: (ps[0], ts[0]), lambda x, y: tf.identity(x))
        f = lambda x: tf.scan(lambda c, _: (h(*c), c[0]), tf.range(2), (x, constant(1.0)))[0][-1]
        close(gradient(f, constant(1.0)), 1)

    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
    def test_dce(self, wrap):
        def rule(ps, ts):
            (x, y), (dx, dy) = ps, ts
            return h(x, y), (2 * tf.cos(x) * dx, 1.5 * dx - tf.sin(y) * dy / 2)

        h = with_jvp(rule, lambda x, y: (tf.sin(x), x + tf.cos(y)))
        x, y = constant(0.1), constant(-1.3)
        expected = [[2 * math.cos(0.1), 0], [1.5, -math.sin(-1.3) / 2]]
        for k, (by_x, by_y) in enumerate(expected):
            f = wrap(lambda x, y, k=k: h(x, y)[k])
            close(pushed(lambda x, f=f: f(x, y), x, constant(1.0)), by_x)
            close(pushed(lambda y, f=f: f(x, y), y, constant(1.0)), by_y)

    def test_resolve_kwargs_error_message(self):
        h = with_jvp(lambda ps, ts: (ps[0], ts[0]), lambda x, y, *, z=None: x + y)
        with pytest.raises(TypeError, match="missing a required argument: 'y'"):
            h(constant(0.5))

    def test_custom_jvp_transpose_vjp3(self):
        h = with_jvp(lambda ps, ts: (h(*ps), h(ts[0], ps[1])), lambda x, y: x / y)
        close(gradient(lambda x: h(x, constant(2.0)), constant(1.0)), 0.5)


class TestCustomVJP:
    def test_basic(self):
        h, x = pulled(twice_cos), constant(3.0)
        close(h(x), math.sin(3))
        close(gradient(h, x), 2 * math.cos(3))

    def test_invariance(self):
        h, x = pulled(lambda x: 3.0, lambda x: tf.cos(2 * x) / 2), constant(1.0)

        def again(f):
            def value(x):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = f(x)
                tape.gradient(y, x)
                return y

            return value

        for f in (again(h), again(again(h))):
            close(f(x), math.cos(2) / 2)
            close(gradient(f, x), 3)

    def test_deepcopy(self):
        close(gradient(copy.deepcopy(pulled(tf.cos)), constant(1.0)), math.cos(1))

    @pytest.mark.parametrize("x", [2.0, -2.0])
    def test_python_control_flow(self, x):
        @sgtrick.custom_vjp
        def h(x):
            return tf.sin(x) if x > 0 else tf.cos(x), lambda u: (2 if x > 0 else 3) * u

        close(h(constant(x)), math.sin(x) if x > 0 else math.cos(x))
        close(gradient(h, constant(x)), 2 if x > 0 else 3)

    @pytest.mark.parametrize("x", [2.0, -2.0])
    def test_python_control_flow_bwd(self, x):
        @sgtrick.custom_vjp
        def h(x):
            y = tf.cond(x > 0, lambda: tf.sin(x), lambda: tf.cos(x))
            return y, lambda u: (2 if x > 0 else 3) * u

        close(gradient(h, constant(x)), 2 if x > 0 else 3)

    def test_vmap(self):
        def scalar(x):
            assert x.shape.rank == 0
            return tf.sin(x)

        h = pulled(twice_cos, scalar)
        xs = constant([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
        rows, each = mapped(h), mapped(mapped(h))
        close(each(xs), np.sin(xs))
        for f in (mapped(mapped(derivative(h))), derivative(each), mapped(derivative(rows))):
            close(f(xs), 2 * np.cos(xs))

    def test_jit(self):
        h, x = pulled(twice_cos), constant(3.0)
        close(tf.function(tf.function(h))(x), math.sin(3))
        for way in WAYS.values():
            close(way(h)(x), 2 * math.cos(3))

    def test_pytrees(self):
        @sgtrick.custom_vjp
        def h(x):
            r = {"r": tf.cos(x["a"])}
            return {"b": tf.sin(x["a"])}, lambda u: ({"a": 2 * r["r"] * u},)

        x = constant(3.0)
        close(gradient(lambda x: h({"a": x})["b"], x), 2 * math.cos(3))

    @pytest.mark.parametrize("f", [lambda h: h, mapped, tf.function], ids=["", "vmap", "jit"])
    def test_jvp_error(self, f):
        x = constant([0.0, 1.0])
        close(pushed(f(pulled(twice_cos)), x, tf.ones_like(x)), 2 * np.cos(x))

    def test_kwargs(self):
        @sgtrick.custom_vjp
        def h(x, y, c=1.0):
            return c * (x + y), lambda u: (u, u, u)

        x, y, c = constant(10.0), constant(5.0), constant(2.0)
        close(gradients(lambda x, y, c: h(x, y, c=c) ** 2, x, y, c), [60, 60, 60])

    def test_initial_style(self):
        f = scanned(pulled(twice_cos))
        close(gradient(f, constant(3.0)), 2 * math.cos(3))
        close(derivative(derivative(f))(constant(3.0)), -2 * math.sin(3))

    def test_initial_style_vmap(self):
        f = mapped(scanned(pulled(twice_cos, lambda x: 3 * x)))
        x = constant([0.0, 1.0, 2.0])
        close(f(x), 3 * x)
        close(gradient(f, x), 2 * np.cos(x))

    def test_nondiff_argnums(self):
        @sgtrick.custom_vjp
        def app(f, x):
            return f(x), lambda u: (None, tf.cos(x) * u)

        close(app(lambda x: 2 * x, constant(1.0)), 2)
        close(gradient(lambda x: app(lambda y: 2 * y, x), constant(1.0)), math.cos(1))
        close(gradient(lambda x: app(f=lambda y: 2 * y, x=x), constant(1.0)), math.cos(1))

    def test_nondiff_argnums_unhashable(self):
        @sgtrick.custom_vjp
        def h(numbers, x):
            return numbers[0] * tf.sin(x), lambda u: (None, numbers[0] * tf.cos(x) * u)

        f, x = lambda x: h([2.0], x), constant([0.0, 1.0, 3.0])
        close(f(x), 2 * np.sin(x))
        for way in (derivative(f), tf.function(derivative(f)), mapped(derivative(f))):
            close(way(x), 2 * np.cos(x))

    def test_nondiff_argnums_argnames(self):
        @sgtrick.custom_vjp
        def app(f, g, x):
            return f(x) + g(x), lambda u: (None, None, tf.cos(x) * u)

        double = lambda x: 2 * x
        close(gradient(lambda x: app(double, double, x), constant(1.0)), math.cos(1))

    def test_closed_over_vmap_tracer(self):
        def outer(x):
            return sgtrick.custom_vjp(lambda y: (x * y, lambda u: tf.cos(y) * u))

        close(mapped(lambda x: outer(x)(constant(3.0)))(constant([0.0, 1.0, 2.0])), [0, 3, 6])

    def test_closed_over_tracer3(self):
        def outer(x):
            return derivative(sgtrick.custom_vjp(lambda y: (x * y, lambda u: tf.cos(y) * u * x)))

        found = mapped(lambda x: outer(x)(constant(3.0)))(constant([0.0, 1.0, 2.0]))
        close(found, math.cos(3) * np.arange(3))

    @pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x,)], ids=["", "nested"])
    def test_nondiff_arg_tracer_error(self, pack):
        @sgtrick.custom_vjp
        def h(x, y):
            first = tf.nest.flatten(x)[0]
            return first * y, lambda u: (None, tf.cos(y) * u)

        f = tf.function(lambda y: h(pack(constant(2.0)), y))
        close(f(constant(3.0)), 6)
        close(gradient(f, constant(3.0)), math.cos(3))

    def test_missing_vjp_rule_error(self):
        with pytest.raises(TypeError, match="must return"):
            sgtrick.custom_vjp(square)(constant(2.0))

    def test_vjp_rule_inconsistent_pytree_structures_error(self):
        h = sgtrick.custom_vjp(lambda x: (x, lambda u: (u, u)))
        h(constant(2.0))
        with pytest.raises(ValueError, match="returned 2 gradients, expected 1"):
            gradient(h, constant(2.0))

    def test_vjp_bwd_returns_non_tuple_error(self):
        h = sgtrick.custom_vjp(lambda x: (tf.identity(x), lambda u: 2 * u))
        close(gradient(h, constant(3.0)), 2)

    def test_lowering_out_of_traces(self):
        relu = with_jvp(
            lambda xs, ts: (relu(*xs), tf.where(xs[0] > 0, ts[0], 0)), lambda x: tf.nn.relu(x)
        )

        class F(NamedTuple):
            a: tf.Tensor

            def __call__(self, x):
                return relu(self.a) * x

        g = tf.function(lambda f, x: f(x))
        close(gradient(lambda x: g(F(constant(2.0)), x), constant(0.0)), 2)

    def test_clip_gradient(self):
        clip = sgtrick.custom_vjp(
            lambda lo, hi, x: (tf.identity(x), lambda u: (None, None, tf.clip_by_value(u, lo, hi)))
        )
        close(gradient(lambda x: clip(constant(-0.1), x + 0.1, x), constant(0.1)), 0.2)

    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["", "jit"])
    def test_nestable_vjp(self, wrap):
        @sgtrick.custom_vjp
        def g(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x**2
            slope = tape.gradient(y, x)
            return y, lambda u: u * slope

        close(wrap(lambda x, u: gradient(g, x, u))(constant(1.0), constant(3.0)), 6)

    def test_initial_style_vmap_2(self):
        @sgtrick.custom_vjp
        def total(x):
            ones = tf.ones_like(x)
            return tf.reduce_sum(x), lambda u: u * ones

        x = tf.ones([5, 3], tf.float64)
        f = lambda x: tf.scan(lambda c, _: derivative(mapped(total))(x), tf.range(2), x)[-1]
        close(f(x), tf.ones([5, 3]))

    def test_initial_style_vmap_3(self):
        y, x = constant([1.0, 2.0, 3.0]), constant([0.0, 1.0, 2.0])
        f = mapped(scanned(pulled(twice_cos, lambda x: 3 * x * tf.reduce_sum(y))))
        close(f(x), 18 * x)
        close(gradient(f, x), 2 * np.cos(x))

    @pytest.mark.parametrize("forward", [False, True], ids=["bwd", "fwd"])
    def test_bwd_closes_over_tracer(self, forward):
        def f(y):
            def h(x):
                slope = 2 * tf.cos(y)
                return 2 * tf.sin(x), lambda u: (slope if forward else 2 * tf.cos(y)) * u

            return derivative(sgtrick.custom_vjp(h))(constant(1.0))

        y = constant([0.0, 1.0, 2.0])
        close(tf.function(f)(y[2]), 2 * math.cos(2))
        for many in MAPS.values():
            close(many(f)(y), 2 * np.cos(y))
        close(gradient(f, constant(4.0)), -2 * math.sin(4))

    def test_float0(self):
        """JAX takes any number as the gradient of an integer; here it has to be zero."""
        x, i = constant(2.0), tf.constant(3)
        h = sgtrick.custom_vjp(lambda x, i: (tf.identity(x), lambda u: (2 * u, tf.zeros_like(i))))
        close(gradient(lambda x: h(x, i), x), 2)
        h = sgtrick.custom_vjp(lambda x, i: (tf.identity(x), lambda u: (2 * u, tf.constant(1))))
        with pytest.raises((TypeError, ValueError), match="gradient for i"):
            gradient(lambda x: h(x, i), x)

    def test_float0_initial_style(self):
        h = sgtrick.custom_vjp(lambda x: (x, lambda *u: (2.0, tf.zeros([]))))
        f = lambda x, i: tf.while_loop(
            lambda k, *_: k < 1, lambda k, x, i: (k + 1, *h((x, i))), (0, x, i)
        )[1]
        close(gradient(lambda x: f(x, tf.constant(3)), constant(2.0)), 2)

    def test_remat(self):
        h, x = pulled(twice_cos), constant(2.0)
        g = tf.recompute_grad(lambda x: h(h(x)))
        close(g(x), math.sin(math.sin(2)))
        close(gradient(g, x), 4 * math.cos(2) * math.cos(math.sin(2)))

    def test_remat_pytree_arg(self):
        @sgtrick.custom_vjp
        def h(xy):
            return xy["a"] * xy["b"], lambda u: ({"a": u * xy["b"], "b": u * xy["a"]},)

        g = tf.recompute_grad(lambda a, b: tf.sin(h({"a": a, "b": b})))
        expected = [3 * math.cos(6), 2 * math.cos(6)]
        close(gradients(g, constant(2.0), constant(3.0)), expected)

    def test_remat_nondiff_argnums(self):
        @sgtrick.custom_vjp
        def h(k, x):
            slope = k * tf.cos(k * x)
            return tf.sin(k * x), lambda u: (None, slope * u)

        g = tf.recompute_grad(lambda x: 3 * h(2.0, x))
        close(gradient(g, constant(0.5)), 6 * math.cos(1))

    def test_remat_higher_order(self):
        h, x = pulled(twice_cos), constant(2.0)
        g = lambda x: h(h(x))
        close(derivative(derivative(tf.recompute_grad(g)))(x), SECOND)

    @pytest.mark.parametrize("many", [lambda f: f, mapped], ids=["", "vmap"])
    def test_bwd_nones(self, many):
        h = sgtrick.custom_vjp(lambda x, y: (x * tf.sin(y), lambda u: (None, 2 * tf.cos(y) * u)))
        x = constant([0.0, 3.0])
        close(gradient(lambda x: many(h)(x, x), x), 2 * np.cos(x))

    def test_bwd_nones_pytree(self):
        h = sgtrick.custom_vjp(
            lambda xs, y: (xs[0] * xs[1] * tf.sin(y), lambda u: (None, 2 * tf.cos(y) * u))
        )
        close(gradient(lambda x: h((x, x), x), constant(3.0)), 2 * math.cos(3))

    def test_custom_vjp_closure_4521(self):
        h = sgtrick.custom_vjp(lambda x, y: ((x + y, None), lambda *u: (u[0], u[0])))
        f = lambda x, y: mapped(lambda x: h(x, y)[0])(x)
        close_all(gradients(f, constant([1.0, 2.0]), constant(3.0)), [[1, 1], 2])

    def test_float0_bwd_none(self):
        h = sgtrick.custom_vjp(lambda i, x: (tf.sin(x), lambda u: (None, 2 * tf.cos(x) * u)))
        close(gradient(lambda x: h(tf.constant([1, 2]), x), constant(3.0)), 2 * math.cos(3))

    @pytest.mark.parametrize("pack", [lambda g: (g,), lambda g: g], ids=["", "singleton"])
    def test_custom_gradient(self, pack):
        h, x = sgtrick.custom_vjp(lambda x: (x**2, lambda u: pack(u * x))), constant(3.0)
        close(h(x), 9)
        close(gradient(h, x), 3)
        close(derivative(derivative(h))(x), 1)

    def test_custom_gradient_2(self):
        h = sgtrick.custom_vjp(lambda x, y: (x * y, lambda u: (y, x)))
        close(gradients(h, constant(3.0), constant(4.0)), [4, 3])

    def test_custom_gradient_3(self):
        weights = constant([3.0, 4.0, 5.0])
        h = sgtrick.custom_vjp(lambda x: (tf.reduce_sum(tf.sin(x)), lambda u: tf.cos(x) * weights))
        x = constant([0.0, 1.0, 2.0])
        close(gradient(h, x), np.cos(x) * weights)

    @pytest.mark.parametrize("scale", [1.0, 3.0], ids=["", "mixed_consts"])
    def test_closure_convert(self, scale):
        def solve(c, x):
            s = constant([scale, scale])
            distance = lambda x, c: tf.reduce_sum(s * (x - c) ** 2)
            rule = lambda x, c: (tf.cos(distance(x, c)), lambda u: (17 * x, 42 * c))
            return sgtrick.custom_vjp(rule)(x, c)

        c, x = constant([2.0, 2.0]), constant([1.0, 1.0])
        close(gradients(solve, c, x), [42 * c, 17 * x])

    def test_float0_cotangents_automatically_handled(self):
        h = sgtrick.custom_vjp(lambda x, i: (tf.identity(x), lambda u: (u, 0)))
        f = tf.function(lambda i: gradient(lambda x: h(x, i), constant(0.0)))
        close(f(tf.constant(1)), 1)

    @pytest.mark.long
    def test_custom_vjp_scan_batching_edge_case(self):
        mul = sgtrick.custom_vjp(lambda x, c: (x * c, lambda u: (u * c, tf.reduce_sum(x * u))))
        x = constant(np.random.default_rng(0).standard_normal((3, 2)))
        c = constant(1.1)

        def many(f):
            return lambda x, c: mapped(lambda x: scanned(lambda x: f(x, c), 3)(x))(x)

        def slope(f):
            return lambda x, c: gradients(lambda x, c: many(f)(x, c) ** 2, x, c)

        close_all(slope(mul)(x, c), slope(tf.multiply)(x, c))
        for k in range(2):
            second = lambda f, k=k: gradients(lambda x, c: slope(f)(x, c)[k], x, c)
            close_all(second(mul), second(tf.multiply))

    def test_closure_with_vmap2(self):
        def h(z):
            def f(x):
                return sgtrick.custom_vjp(lambda y: (x * y, lambda u: x * u))(z)

            return mapped(f)(constant([0.0, 1.0, 2.0]))

        close(gradient(h, constant(3.14)), 3)

    def test_pytrees_not_required_to_contain_nones(self):
        class A(list):
            pass

        h = sgtrick.custom_vjp(lambda x: (tf.identity(x[0]), lambda u: (A([u]),)))
        close(gradient(lambda x: h(A([x])), constant(1.0)), 1)

    def test_vmap_vjp_called_twice(self):
        h, x = sgtrick.custom_vjp(lambda x: (tf.identity(x), lambda u: u)), constant([3.0, 4.0])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = mapped(h)(x)
        for _ in range(2):
            close(tape.gradient(y, x, constant([3.0, 2.0])), [3, 2])

    def test_run_rules_more_than_once(self):
        h = sgtrick.custom_vjp(lambda x, y: (x + y, lambda u: (u, u)))
        f = lambda x: tf.scan(lambda c, _: (h(*c), c[0]), tf.range(2), (x, constant(1.0)))[0][-1]
        close(gradient(f, constant(1.0)), 2)  # (x + 1) + x

    @pytest.mark.parametrize("last", [3.0, None], ids=["subtrees", "pytree"])
    def test_nones_representing_zeros_in_subtrees_returned_by_bwd(self, last):
        h = sgtrick.custom_vjp(lambda x: (tf.identity(x[0]), lambda u: ((u, (None, None)),)))
        close(gradient(lambda x: h((x, (constant(2.0), last))), constant(1.0)), 1)

    def test_bwd_rule_shape_mismatch(self):
        zeros = tf.zeros([3], tf.float64)
        h = sgtrick.custom_vjp(lambda x, y: (tf.identity(x), lambda u: (zeros, zeros)))
        with pytest.raises(ValueError, match=r"shape \[3\] for y, expected \[4\]"):
            gradient(lambda y: h(zeros, y * y), tf.ones([4], tf.float64))

    def test_bwd_rule_can_produce_list_or_tuple(self):
        h = sgtrick.custom_vjp(lambda x, y: (x * y, lambda u: [u * y, x * u]))
        close(gradients(h, constant(1.0), constant(2.0)), [2, 1])

    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "tf.function"])
    def test_dce(self, wrap):
        @sgtrick.custom_vjp
        def h(x, y):
            def pull(u, v):
                return 2 * tf.cos(x) * u + 1.5 * v, -tf.sin(y) * v / 2

            return (tf.sin(x), x + tf.cos(y)), pull

        x, y = constant(0.1), constant(-1.3)
        close(gradients(wrap(lambda x, y: h(x, y)[0]), x, y), [2 * math.cos(0.1), 0])
        close(gradients(wrap(lambda x, y: h(x, y)[1]), x, y), [1.5, -math.sin(-1.3) / 2])

    def test_resolve_kwargs_error_message(self):
        h = sgtrick.custom_vjp(lambda x, y, *, z=None: (x + y, lambda u: (u, u, None)))
        with pytest.raises(TypeError, match="missing a required argument: 'y'"):
            h(constant(0.5))


def square(x):
    return x**2


def matvec(a, b):
    return tf.linalg.matvec(a, b)


def logistic_rule(primals, tangents):
    y = tf.sigmoid(primals[0])
    return y, tangents[0] * y * (1 - y)


def fibonacci(f):
    """A loop over five numbers, of which the first goes through `f` and each is added to the next."""

    def step(c, _):
        return (f(c[0]), *(a + b for a, b in itertools.pairwise(c)))

    def run(x):
        zero = tf.zeros_like(x)
        return tf.scan(step, tf.range(6), (x, zero, zero, zero, zero))[-1][-1]

    return run


def scanned_pair(h):
    return lambda x, y: tf.while_loop(
        lambda k, *_: k < 1, lambda k, x, y: (k + 1, *h(x, y)), (0, x, y)
    )[1:]


def mapped_with_loops(f, xs):
    """For operations that TensorFlow maps by a loop, as random ones."""
    return tf.vectorized_map(f, xs)


def close_all(found, expected):
    for a, b in zip(found, expected, strict=True):
        close(a, b, rtol=1e-10)
