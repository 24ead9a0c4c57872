"""Derivatives of second order of rules that have them: those of the rule, by any nesting."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import (
    EVERY_ORDER,
    FIRST_ORDER,
    OF_SLOPE,
    POINTS,
    exact,
    hidden,
    host_slope,
    jvp_form,
    slope,
    true,
    verdict,
    vjp_form,
)
from matrix import LOUD, spread, traced
from matrix.functions import misled
from shared import (
    EXECUTED,
    MODES,
    TWICE,
    WAYS,
    WRAPS,
    Way,
    by_jacobian,
    compiled,
    constant,
    derivative,
    forward_derivative,
    mapped,
    on_host,
    with_jvp,
)

SECOND = WAYS | {
    "inner in tf.function": Way(between=traced),
    "around vectorized_map": Way(inside=mapped, around=traced),
    "between": Way(between=mapped),
}


def twice(f):
    return derivative(derivative(f))


# Those that have every cell of second derivatives in tests/matrix are in few here.
IN_THE_MATRIX = {"from_value_and_gradient": "between", "custom_jvp": "inner in tf.function"}
# Where TensorFlow takes minutes for forward mode of a rule as long as that of a root.
LONG = {"around tf.function", "between", "in vectorized_map", "around vectorized_map"}


def is_run(name, where, modes):
    """XLA compiles the graph that `tf.function` traced, so that one form is enough for the modes."""
    outer, inner = modes
    if where == "in XLA" and name != "custom_vjp":
        return outer == inner == "reverse" and name not in IN_THE_MATRIX
    if where == "around vectorized_map" and outer == "forward":
        return False  # where TensorFlow has no derivative of native functions either
    if name == "implicit_root" and "forward" in modes:
        return where not in LONG and inner == "reverse"
    return IN_THE_MATRIX.get(name, where) == where


@functools.cache
def of_second_order(f, where, outer, inner):
    return verdict(SECOND[where](f, MODES[inner], MODES[outer]), exact(2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "where", "modes"),
    spread(EVERY_ORDER, SECOND, itertools.product(MODES, repeat=2), valid=is_run),
)
def test_by_any_nesting(name, where, modes):
    came = of_second_order(EVERY_ORDER[name], where, *modes)
    if came != "right":  # TensorFlow cannot do it with native code either
        assert came in LOUD
        # The rule of the batch is traced anew, where its host call cannot be carried.
        is_batch = name == "from_value_and_gradient" and where == "between"
        assert is_batch or of_second_order(true, where, *modes) in LOUD


OF_FUNCTIONS = {
    "function": Way(inside=traced, between=mapped),
    "function of a map": Way(inside=lambda f: traced(mapped(f)), between=mapped, around=traced),
    "gradient as a function": Way(inside=traced, between=lambda f: mapped(traced(f))),
    # There, a map is a function.
    "map in XLA": Way(inside=mapped, between=mapped, around=compiled),
}
XLA = pytest.param("map in XLA", marks=pytest.mark.long)


@pytest.mark.parametrize("where", [*list(OF_FUNCTIONS)[:-1], XLA])
def test_of_mapped_gradients_of_functions(where):
    x = np.stack([POINTS, POINTS + 0.1])
    found = OF_FUNCTIONS[where](OF_SLOPE["custom_vjp"](hidden, slope), *TWICE)(tf.constant(x))
    np.testing.assert_allclose(tf.convert_to_tensor(found), exact(2, x), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "where", "index"),
    spread(
        EVERY_ORDER,
        ["eager", "in tf.function", "around tf.function"],
        [tf.int32, tf.int64],
        together=1,
    ),
)
def test_derivatives_behind_a_gather(name, where, index):
    """Where TensorFlow makes upstream gradients of slices."""
    places = tf.constant([0, 0, 2], index)

    def behind(f):
        total = lambda x: tf.gather(f(x), places) ** 2  # noqa: E731
        first = lambda x: tf.convert_to_tensor(derivative(total)(x))  # noqa: E731
        return lambda x: tf.convert_to_tensor(derivative(first)(x))

    form, x = EVERY_ORDER[name], tf.constant(POINTS)
    np.testing.assert_allclose(WAYS[where](form, behind)(x), behind(true)(x), rtol=1e-9)


class TestTapesAroundForwardMode:
    """They are asked for derivatives of a JVP, whose rule was traced apart."""

    @staticmethod
    def of_jvp(form, x, *sources, tangent=None):
        """By each of the sources, those of the sum of the derivative at `x`."""
        with tf.GradientTape() as tape:
            tape.watch([s for s in sources if isinstance(s, tf.Tensor)])
            tangent = tf.ones_like(x) if tangent is None else tangent
            with tf.autodiff.ForwardAccumulator(x, tangent) as accumulator:
                y = form(x)
            moved = accumulator.jvp(y)
        return tape.gradient(moved, sources)

    @WRAPS
    @pytest.mark.parametrize("alone", [False, True], ids=["and the function", "alone"])
    def test_see_variables_that_the_rule_reads(self, alone, wrap):
        v = tf.Variable(0.7, dtype=tf.float64)
        form = jvp_form(lambda x: hidden(x) * (1 if alone else v), lambda x: slope(x) * v)
        (by_v,) = wrap(lambda x: self.of_jvp(form, x, v))(tf.constant(POINTS))
        np.testing.assert_allclose(by_v, exact(1).sum(), rtol=1e-12)

    SHARED = {
        "closed over": lambda x, c, v: sgtrick.with_gradient(
            lambda x: hidden(x) * c * v, lambda x: slope(x) * c * v
        )(x),
        "arguments": sgtrick.custom_vjp(
            lambda x, c, v: (
                hidden(x) * c * v,
                lambda u: (u * slope(x) * c * v, u * hidden(x) * v, u * hidden(x) * c),
            )
        ),
    }

    @pytest.mark.long
    @pytest.mark.parametrize("form", SHARED.values(), ids=SHARED)
    def test_around_vectorized_map(self, form):
        """By the point, which is another for each member, and by what the members share."""
        c, v = constant(0.9), tf.Variable(0.7, dtype=tf.float64)
        h = mapped(lambda x: form(x, c, v))
        by_x, by_c, by_v = tf.function(lambda x: self.of_jvp(h, x, x, c, v))(tf.constant(POINTS))
        np.testing.assert_allclose(by_x, 0.63 * exact(2), rtol=1e-12)
        np.testing.assert_allclose([by_c, by_v], [0.7 * exact(1).sum(), 0.9 * exact(1).sum()])

    @WRAPS
    def test_see_rows_that_the_rule_gathers(self, wrap):
        table = tf.Variable(np.arange(8.0).reshape(4, 2))

        def factor():
            return tf.reduce_sum(tf.gather(table, [2, 0]) ** 2)

        form = jvp_form(lambda x: x**3 * factor(), lambda x: 3 * x**2 * factor())
        (by_table,) = wrap(lambda x: self.of_jvp(form, x, table))(constant(1.5))
        expected = 3 * 1.5**2 * 2 * np.array([[0, 1], [0, 0], [4, 5], [0, 0]])
        np.testing.assert_allclose(tf.convert_to_tensor(by_table), expected, rtol=1e-12)

    SLOPES = {
        "stopped": lambda x: tf.stop_gradient(slope(x)),
        "host": host_slope,
        "by a form": derivative(FIRST_ORDER["custom_gradient"]),
    }

    @pytest.mark.long
    @WRAPS
    @pytest.mark.parametrize("slope", SLOPES.values(), ids=SLOPES)
    def test_of_a_slope_that_is_lost_beside_another_factor(self, slope, wrap):
        """A `tf.stop_gradient` is taken at its word, a form or host call raises errors."""
        form = with_jvp(
            lambda xs, ts: (None, 0 if ts[0] is None else slope(xs[0]) * xs[1] * ts[0]),
            lambda x, w: hidden(x) * w,
        )

        w = constant(np.full(3, 2.0))

        def by_w(x):
            return self.of_jvp(lambda x: form(x, w), x, w)[0]

        def by_x(x):
            return self.of_jvp(lambda x: form(x, w), x, x)[0]

        if slope is host_slope:
            assert verdict(wrap(by_w), exact(1)) in LOUD
        else:
            assert verdict(wrap(by_w), exact(1)) == "right"
        if slope is self.SLOPES["stopped"]:
            assert wrap(by_x)(tf.constant(POINTS)) is None
        else:
            assert verdict(wrap(by_x), 2 * exact(2)) in LOUD

    @pytest.mark.long
    @pytest.mark.parametrize(("name", "wrap"), spread(EVERY_ORDER, EXECUTED.values(), together=1))
    def test_where_the_point_is_its_own_tangent(self, name, wrap):
        form = EVERY_ORDER[name]
        (by_x,) = wrap(lambda x: self.of_jvp(form, x, x, tangent=x))(tf.constant(POINTS))
        np.testing.assert_allclose(by_x, exact(1) + POINTS * exact(2), rtol=1e-9)


_one_more = tf.function(lambda x: 1 + x)
_true = tf.function(true)


@pytest.mark.long
class TestRulesThatCallFunctions:
    """Their derivatives are found in each call."""

    RULES = {
        "a form": tf.function(sgtrick.with_gradient(slope, lambda x: -x * (1 + x**2) ** -1.5)),
        "the gradient of a form": derivative(tf.function(EVERY_ORDER["with_gradient"])),
        "with a constant first": lambda x: (_one_more(0 * POINTS[0]) * _one_more(x**2)) ** -0.5,
        "with a constant second": lambda x: (_one_more(x**2) * _one_more(0 * POINTS[0])) ** -0.5,
        "in a tape": derivative(_true),
        "in a tape, once more": lambda x: derivative(_true)(x) + 0 * _true(constant(1.0)),
    }

    @pytest.mark.parametrize(
        ("rule", "way", "make"),
        spread(
            RULES,
            ["eager", "in tf.function", "around tf.function", "around vectorized_map"],
            [sgtrick.with_gradient, vjp_form, jvp_form],
            # Where it is slow, one rule.
            valid=lambda rule, way, make: (
                "map" not in way or (rule, make) == ("the gradient of a form", vjp_form)
            ),
        ),
    )
    def test_of_second_order(self, rule, way, make):
        assert verdict(WAYS[way](make(hidden, self.RULES[rule]), *TWICE), exact(2)) == "right"


def _in_scan(t, s):
    return tf.scan(lambda _, e: e[0] * e[1], (t, s), tf.zeros_like(t[0]))


class TestJvpRules:
    """Which `custom_jvp` transposes: what it transposes has derivatives of its own."""

    WAYS = {
        way: dataclasses.replace(run, modes=TWICE)
        for way, run in WAYS.items()
        if way != "in vectorized_map"
    } | {
        "reverse over forward": Way(around=traced, modes=(forward_derivative, derivative)),
        "by tape.jacobian": Way(around=traced, modes=(derivative, by_jacobian)),
        "in map_fn": Way(around=lambda f: traced(lambda x: tf.map_fn(f, x)), modes=TWICE),
        "around map_fn": Way(lambda f: lambda x: tf.map_fn(f, x), around=traced, modes=TWICE),
        "in tf.cond": Way(
            around=lambda f: traced(lambda x: tf.cond(x[0] < 9, lambda: f(x), lambda: x)),
            modes=TWICE,
        ),
    }
    # From a tangent and a slope to their product.
    TANGENTS = {
        "tf.function": tf.function(lambda t, s: t * s),
        "tf.while_loop": lambda t, s: tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, y + t * s / 2), (0, tf.zeros_like(t))
        )[1],
        "tf.cond": lambda t, s: tf.cond(tf.reduce_sum(s) > -9, lambda: t * s, lambda: t),
        "tf.map_fn": lambda t, s: tf.map_fn(
            lambda a: a[0] * a[1], (t, s), fn_output_signature=t.dtype
        ),
        "tf.scan": _in_scan,
    }

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("way", "tangent"),
        spread(
            WAYS,
            TANGENTS,
            valid=lambda way, tangent: (
                tangent == "tf.function" or way in ("eager", "around tf.function")
            ),
        ),
    )
    def test_whose_tangents_pass_functions_and_loops(self, way, tangent):
        through = self.TANGENTS[tangent]
        form = with_jvp(lambda xs, ts: (None, through(ts[0], slope(xs[0]))), hidden)
        assert verdict(self.WAYS[way](form), exact(2)) == "right"

    @pytest.mark.long
    @pytest.mark.parametrize("way", ["eager", "in tf.function", "around tf.function", "in XLA"])
    def test_which_are_functions(self, way):
        rule = tf.function(lambda xs, ts: (hidden(xs[0]), slope(xs[0]) * ts[0]))
        form = with_jvp(rule, hidden)
        assert verdict(self.WAYS[way](form), exact(2)) == "right"

    @pytest.mark.long
    @pytest.mark.parametrize(
        "way", [way for way in WAYS if "around" not in way or way == "around tf.function"]
    )
    def test_which_call_their_function(self, way):
        """For a value that has a derivative by the rule, not by how it was computed."""
        form = sgtrick.custom_jvp(misled(tf.tanh))

        @form.defjvp
        def _(primals, tangents):
            y = form(*primals)
            return y, (1 - y**2) * tangents[0]

        y = np.tanh(POINTS)
        assert verdict(self.WAYS[way](form), -2 * y * (1 - y**2)) == "right"


class TestAssignedVariables:
    """Of `v x^3`, whose gradient is that of the call, and whose second derivative needs `v` then."""

    @staticmethod
    def run(by, *, assigned=100.0, wrap=lambda f: f):
        v = tf.Variable(2.0, dtype=tf.float64)
        form = sgtrick.from_value_and_gradient(lambda x: (v * x**3, 3 * v * x**2))

        def run(x):
            v.assign(2.0)
            with tf.GradientTape(persistent=True) as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = wrap(form)(x)
                g = inner.gradient(y, x)
            v.assign(assigned)
            return g, outer.gradient(g, {"x": x, "v": v}[by])

        return run

    @WRAPS
    @pytest.mark.parametrize(("by", "assigned"), [("v", 100.0), ("v", 2.0), ("x", 2.0)])
    def test_what_is_known_of_them_is_right(self, wrap, by, assigned):
        expected = {"x": 12, "v": 3}[by]
        found = wrap(self.run(by, assigned=assigned))(constant(1.0))
        np.testing.assert_allclose(found, [6, expected], rtol=1e-12)

    @pytest.mark.long
    def test_what_is_not_known_is_an_error(self):
        message = "differentiated after a variable was assigned"
        with pytest.raises(LookupError, match=message):
            self.run("x")(constant(1.0))
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            tf.function(self.run("x"))(constant(1.0))
        for loud in (compiled(self.run("x")), self.run("x", wrap=tf.function)):
            first, second = loud(constant(1.0))
            assert (float(first), np.isnan(second)) == (6, True)


class TestDraws:
    """A second derivative of `from_value_and_gradient` evaluates the function once more."""

    GENERATOR = tf.random.Generator.from_seed(1)
    DRAWN = {
        "global": lambda: tf.random.normal([3], dtype=tf.float64),
        "generator": lambda: TestDraws.GENERATOR.uniform([3], dtype=tf.float64),
        "NumPy": lambda: tf.numpy_function(
            lambda: np.random.default_rng().normal(size=3), [], tf.float64
        ),
    }

    @staticmethod
    def form(draw):
        def f(x):
            e = tf.reshape(draw(), [3])
            return tf.sin(e * x), e * tf.cos(e * x)

        return sgtrick.from_value_and_gradient(f)

    @WRAPS
    @pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
    def test_that_differ_are_an_error(self, draw, wrap):
        with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match="draws random"):
            wrap(twice(self.form(draw)))(constant(POINTS))

    @WRAPS
    def test_that_are_the_same_are_right(self, wrap):
        draw = lambda: tf.random.stateless_normal([3], [1, 2], dtype=tf.float64)  # noqa: E731
        found = wrap(twice(self.form(draw)))(constant(POINTS))
        e = draw()
        np.testing.assert_allclose(found, -(e**2) * tf.sin(e * POINTS), rtol=1e-9)


def in_a_value(x):
    form = sgtrick.with_gradient(lambda c, w: c * host_slope(w), lambda c, w: host_slope(w))
    return form(tf.ones_like(x), x)


def closed_over(x):
    return sgtrick.with_gradient(lambda c: c * host_slope(x), tf.ones_like)(tf.ones_like(x))


# Slopes that the host computes, as other forms return them.
BEHIND = {
    "clipped": lambda x: sgtrick.clip_gradient(host_slope(x), -9.0, 9.0),
    "clipped in tf.function": tf.function(
        lambda x: sgtrick.clip_gradient(host_slope(x), -9.0, 9.0)
    ),
    "returned": lambda x: sgtrick.custom_vjp(lambda y: (y, lambda u: u))(host_slope(x)),
    "exchanged": lambda x: sgtrick.custom_vjp(lambda a, b: ((b, a), lambda u, v: (v, u)))(
        x, host_slope(x)
    )[0],
    "in a value": in_a_value,
    "closed over": closed_over,
}


class TestRulesThatCallForms:
    """What the check of the rule asks is left to these, if they have an answer."""

    BY_HOST = sgtrick.with_gradient(on_host(lambda x, w: x**3 * w), lambda x, w: 3 * x**2 * w)
    COUNTED = sgtrick.custom_vjp(lambda x, n: ((x**3, n), lambda u, _: (3 * u * x**2, None)))
    ENGINE = sgtrick.from_numpy(
        lambda x: x**3, grad=lambda x: 3 * x**2, hessp=lambda x, v: 6 * x * v, event_ndims=0
    )
    CUBES = {
        "whose value the host computes": lambda x: TestRulesThatCallForms.BY_HOST(x, constant(1.0)),
        "beside a tensor": lambda x: TestRulesThatCallForms.BY_HOST(x, 1 + 0 * x),
        "an engine": ENGINE,
        "that returns its argument": sgtrick.custom_vjp(lambda x: (x, lambda u: 3 * u * x**2)),
        "that passes an integer on": tf.function(lambda x: TestRulesThatCallForms.COUNTED(x, 3)[0]),
    }
    LINEAR = {
        "a trick": lambda x: 3 * sgtrick.clip_gradient(x, -1.0, 5.0),
        "a Hessian of zero": lambda x: sgtrick.custom_gradient(
            3 * x, constant(3.0), x, batch_ndims=0, hx=0
        ),
    }

    @WRAPS
    @pytest.mark.parametrize("make", [sgtrick.with_gradient, vjp_form])
    @pytest.mark.parametrize("cube", CUBES.values(), ids=CUBES)
    def test_that_have_derivatives(self, cube, make, wrap):
        form = make(lambda x: x**3, derivative(cube))
        np.testing.assert_allclose(wrap(twice(form))(constant(2.0)), 12)

    @WRAPS
    @pytest.mark.parametrize("make", [sgtrick.with_gradient, vjp_form])
    @pytest.mark.parametrize("linear", LINEAR.values(), ids=LINEAR)
    def test_whose_derivative_is_a_constant(self, linear, make, wrap):
        form = make(lambda x: 3 * x, derivative(linear))
        np.testing.assert_allclose(wrap(twice(lambda x: form(x) ** 2))(constant(2.0)), 18)

    @WRAPS
    @pytest.mark.parametrize(("behind", "name"), spread(BEHIND, OF_SLOPE, together=1))
    def test_of_host_calls_behind_other_forms(self, behind, name, wrap):
        """Beside a connection, which would hide the host call."""
        form = OF_SLOPE[name](hidden, lambda x: BEHIND[behind](x) + 0 * x)
        assert verdict(wrap(derivative(form)), exact(1)) == "right"
        assert verdict(wrap(twice(form)), exact(2)) in LOUD

    @WRAPS
    def test_of_a_host_call_on_what_is_stopped(self, wrap):
        """No derivative is lost by it."""
        one = on_host(np.ones_like)
        form = sgtrick.with_gradient(hidden, lambda x: one(tf.stop_gradient(x)) * slope(x))
        assert verdict(wrap(twice(form)), exact(2)) == "right"
