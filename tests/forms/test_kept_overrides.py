"""What a kept override promises: the value of `f`, and the rule's derivatives everywhere."""

import contextlib
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import (
    ALL,
    CALLS_HOST,
    EVERY_ORDER,
    FIRST_ORDER,
    OF_SLOPE,
    POINTS,
    exact,
    hidden,
    map_of,
    slope,
    true,
    verdict,
)
from matrix import LOUD, spread, traced
from matrix.functions import misled
from shared import (
    EXECUTED,
    FIRST_WAYS,
    FORWARD,
    TWICE,
    WAYS,
    WRAPS,
    Way,
    compiled,
    constant,
    derivative,
    forward_derivative,
    gradient,
    mapped,
    mapped_with_loops,
    on_host,
)

pytestmark = pytest.mark.long

MAYBE = {"right", *LOUD}
IN_THE_MATRIX = set(OF_SLOPE) | {"custom_gradient", "from_numpy"}

FORWARD_MODES = {
    way: dataclasses.replace(WAYS[way], modes=FORWARD)
    for way in ("eager", "around tf.function", "in tf.function", "in XLA")
}


def maps(mapped):
    return {
        "tape around": Way(inside=mapped),
        "tape inside": Way(around=mapped),
        "tape around, in tf.function": Way(inside=mapped, around=traced),
        "tape around, XLA": Way(inside=mapped, around=compiled),
        "forward mode around": Way(inside=mapped, modes=FORWARD),
        "forward mode inside": Way(around=mapped, modes=FORWARD),
    }


MAPPED = maps(mapped)
PLACES = EXECUTED | {"XLA": compiled, "vectorized_map": mapped}


class TestTheValue:
    """To the last bit that of `f`, whatever the rule says."""

    # Not a number that arithmetic with the rule's result could hide.
    SPECIAL = np.array([-0.0, 0.0, np.inf, -np.inf, 1e-300, 0.1, -1e308])

    RULES = {
        "NaN": lambda x: x * np.nan,
        "infinite": lambda x: tf.fill(tf.shape(x), constant(np.inf)),
        "huge": lambda x: 1e300 + 0 * x,
    }

    @pytest.mark.parametrize(
        ("rule", "place", "mode"), spread(RULES, PLACES, ["nothing", "tape", "forward"])
    )
    def test_is_that_of_f(self, rule, place, mode):
        rule = self.RULES[rule]
        forms = [
            *(make(lambda x: tf.identity(x), rule) for make in OF_SLOPE.values()),
            lambda x: sgtrick.custom_gradient(tf.identity(x), rule(x), x),
            lambda x: sgtrick.implicit_root(
                lambda y, a: y * rule(a), x, x, batch_ndims=x.shape.rank
            ),
        ]

        def values(x):
            with contextlib.ExitStack() as stack:
                if mode == "tape":
                    stack.enter_context(tf.GradientTape()).watch(x)
                elif mode == "forward":
                    stack.enter_context(tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)))
                return [f(x) for f in forms]

        for y in PLACES[place](values)(tf.constant(self.SPECIAL)):
            assert y.numpy().tobytes() == self.SPECIAL.tobytes()

    @pytest.mark.parametrize("place", PLACES)
    def test_beside_a_grad_fn_that_calls_a_form(self, place):
        # Whose tangent is not linear: the rule of the inner one adds a constant.
        inner = sgtrick.custom_vjp(lambda u: (2 * u, lambda v: 2 * v + 0.5))
        outer = sgtrick.custom_vjp(lambda x: (x**2, lambda u: inner(u) * x))
        x = constant([2.0, 3.0])
        np.testing.assert_array_equal(PLACES[place](outer)(x), [4.0, 9.0])
        np.testing.assert_array_equal(PLACES[place](derivative(outer))(x), [4.0, 6.0])


class TestRulesWithTapes:
    """Tapes in rules, where TensorFlow suspends or silences tapes."""

    RECOMPUTED = {
        "eager": WAYS["eager"],
        "in tf.function": FIRST_WAYS["in tf.function"],
        "mapped": MAPPED["tape around"],
        "in mapped": MAPPED["tape inside"],
    }
    WAYS = FORWARD_MODES | {
        f"recomputed {name}": lambda f, way=way: way(tf.recompute_grad(f))
        for name, way in RECOMPUTED.items()
    }

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("name", OF_SLOPE)
    def test_first_derivatives(self, name, way):
        form = OF_SLOPE[name](hidden, derivative(true))
        assert verdict(self.WAYS[way](form), exact(1)) == "right"


def _grad_fns():
    """What `custom_vjp` makes of `asinh` with a part of `grad_fn` that is hard to transpose."""
    host_times = on_host(lambda u, x: u * (1 + x**2) ** -0.5)
    identity = sgtrick.custom_vjp(lambda u: (2 * u - u, lambda v: v))

    def of(pull):
        return sgtrick.custom_vjp(lambda x: (hidden(x), lambda u: pull(u, x)))

    return {
        "a call of the host": of(host_times),
        "stopped in part": of(lambda u, x: (u + tf.stop_gradient(u)) / 2 * slope(x)),
        "a nested tf.function": of(lambda u, x: tf.function(lambda u: u * slope(x))(u)),
        "maps another form": of(
            lambda u, x: mapped(identity)(u) * slope(x) if u.shape.rank else identity(u) * slope(x)
        ),
        "a pullback of a tape": of(lambda u, x: gradient(true, x, u)),
    }


GRAD_FNS = _grad_fns()
TRANSPOSABLE = {"a nested tf.function", "maps another form", "a pullback of a tape"}


class TestGradFunctions:
    """Of `custom_vjp`, that TensorFlow cannot transpose, or only with care."""

    @pytest.mark.parametrize(
        ("name", "way"),
        spread(GRAD_FNS, ["tape around, in tf.function", "tape inside"], together=1),
    )
    def test_mapped(self, name, way):
        assert verdict(maps(mapped_with_loops)[way](GRAD_FNS[name]), exact(1)) == "right"

    @pytest.mark.parametrize(("name", "mode"), spread(GRAD_FNS, FORWARD_MODES, together=1))
    def test_in_forward_mode(self, name, mode):
        promised = {"right"} if name in TRANSPOSABLE else LOUD
        assert verdict(FORWARD_MODES[mode](GRAD_FNS[name]), exact(1)) in promised

    @pytest.mark.parametrize("name", ["a call of the host", "stopped in part"])
    @WRAPS
    def test_the_error_of_forward_mode(self, name, wrap):
        message = "Forward mode transposes the gradient function.*sgtrick.custom_jvp"
        with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match=message):
            wrap(forward_derivative(GRAD_FNS[name]))(tf.constant(POINTS))


with_host_call = sgtrick.custom_jvp(lambda x: hidden(x))
with_host_call.defjvp(
    lambda xs, ts: (None, on_host(lambda x, t: t * (1 + x**2) ** -0.5)(xs[0], ts[0]))
)


class TestHostCallsOnTangents:
    """A JVP rule that calls the host with the tangents serves forward mode alone."""

    WAYS = {
        "forward mode": (FORWARD_MODES["eager"], {"right"}),
        "forward mode in tf.function": (FORWARD_MODES["in tf.function"], {"right"}),
        "forward mode around tf.function": (FORWARD_MODES["around tf.function"], MAYBE),
        "forward mode in vectorized_map": (MAPPED["forward mode inside"], MAYBE),
    } | {f"tape, {way}": (run, LOUD) for way, run in WAYS.items() if way != "in XLA"}

    @pytest.mark.parametrize(("way", "promised"), WAYS.values(), ids=WAYS)
    def test_first_derivatives(self, way, promised):
        assert verdict(way(with_host_call), exact(1)) in promised

    def test_the_error_of_tapes(self):
        with pytest.raises(LookupError, match="Reverse mode transposes the JVP rule"):
            derivative(with_host_call)(tf.constant(POINTS))


# Operations of which TensorFlow has no derivative: identities for numbers less than 100.
REFUSED = {
    "none registered": lambda x: (
        tf.raw_ops.Mod(x=x + 50, y=tf.fill(tf.shape(x), constant(100))) - 50
    ),
    "prevented": lambda x: tf.raw_ops.PreventGradient(input=x, message="not differentiable"),
}


class TestOperationsWithoutDerivatives:
    """In a rule they are missed only in a second derivative, and in `f` not at all."""

    FIRST = {way: run for way, run in FIRST_WAYS.items() if way != "forward around tf.function"} | {
        "in XLA": WAYS["in XLA"],
        "in vectorized_map": Way(around=mapped_with_loops),
        "around vectorized_map": Way(inside=mapped_with_loops),
    }
    SECOND = {
        f"twice, {way}": dataclasses.replace(WAYS[way], modes=TWICE)
        for way in ("eager", "in tf.function", "around tf.function", "in XLA")
    }

    @pytest.mark.parametrize(
        ("refused", "name", "way"),
        spread(REFUSED, OF_SLOPE, FIRST, together=1)
        + spread(REFUSED, OF_SLOPE, SECOND, together=1),
    )
    def test_of_rules_and_of_functions(self, refused, name, way):
        make, refused = OF_SLOPE[name], REFUSED[refused]
        run = (self.FIRST | self.SECOND)[way]
        order = len(run.modes)
        of_rule = verdict(run(make(true, lambda x: slope(refused(x)))), exact(order))
        assert of_rule in (LOUD if order == 2 else {"right"})
        if name != "custom_vjp" or "forward" not in way:  # there, an accumulator follows f
            of_f = run(make(lambda x: true(refused(x)), slope))
            assert verdict(of_f, exact(order)) == "right"

    @pytest.mark.parametrize(("refused", "way"), spread(REFUSED, FIRST, together=1))
    def test_with_respect_to_other_arguments(self, refused, way):
        """The rule says how the derivative by `w` varies with the point, which is not asked."""
        refused = REFUSED[refused]
        form = sgtrick.with_gradient(lambda x, w: true(x) * w, lambda x, w: slope(x) * refused(w))
        by_w = self.FIRST[way](lambda w: form(tf.ones_like(w), w))
        assert verdict(by_w, np.arcsinh(np.ones(3))) == "right"

    @WRAPS
    @pytest.mark.parametrize("refused", REFUSED)
    def test_the_error(self, refused, wrap):
        form = OF_SLOPE["from_value_and_gradient"](true, lambda x: slope(REFUSED[refused](x)))
        message = r"(?s)gradient.* was differentiated again.*TensorFlow says: "
        with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match=message):
            wrap(derivative(derivative(form)))(tf.constant(POINTS))


class TestWhenRulesRun:
    """Once a backward pass, and not before."""

    @staticmethod
    def counted(body):
        """`asinh` with a rule that counts, and does `body` to the upstream gradient."""
        count = tf.Variable(0, dtype=tf.int64)

        @sgtrick.custom_vjp
        def form(x):
            def grad_fn(u):
                with tf.control_dependencies([count.assign_add(1)]):
                    return body(tf.identity(u)) * slope(x)

            return hidden(x), grad_fn

        return form, count

    BODIES = {
        "nothing": lambda u: u,
        "loop": lambda u: (
            tf.while_loop(
                lambda i, _: i < tf.cast(tf.reduce_sum(u * 0), tf.int32) + 3,
                lambda i, w: (i + 1, w + u),
                (0, tf.zeros_like(u)),
            )[1]
            / 3
        ),
    }

    @pytest.mark.parametrize("body", BODIES)
    @pytest.mark.parametrize("place", PLACES)
    def test_no_forward_pass_runs_them(self, body, place):
        form, count = self.counted(self.BODIES[body])

        def recorded(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                return form(x)

        for f in (form, recorded):
            assert verdict(PLACES[place](f), exact(0)) == "right"
        assert count.numpy() == 0

    @pytest.mark.parametrize("body", BODIES)
    @pytest.mark.parametrize("way", ["eager", "in tf.function", "around tf.function"])
    def test_a_backward_pass_runs_them_once(self, body, way):
        form, count = self.counted(self.BODIES[body])
        run = FIRST_WAYS[way](form)
        for n in range(1, 4):
            assert verdict(run, exact(1)) == "right"
            assert count.numpy() == n

    @pytest.mark.parametrize("name", ["with_gradient", "custom_jvp", "custom_vjp"])
    @WRAPS
    def test_a_forward_pass_does_not_even_call_them(self, name, wrap):
        def rule(x):
            raise AssertionError("called")

        form = OF_SLOPE[name](hidden, rule)

        @wrap
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = form(x)
                other = tf.sin(x)
            return y + tape.gradient(other, x)

        assert verdict(run, exact(0) + np.cos(POINTS)) == "right"


def looped(f):
    def run(x):
        limit = {"maximum_iterations": 2}  # for XLA
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, f(y)), (0, x), **limit)[1]

    return run


def branched(f):
    return lambda x: tf.cond(tf.reduce_sum(x) > -100.0, lambda: f(f(x)), lambda: x)


class TestLoopsAndBranches:
    """Whose bodies TensorFlow copies, in forward mode in a graph."""

    @pytest.mark.parametrize(
        ("name", "inside", "mode"),
        spread(
            ALL,
            [looped, branched],
            [derivative, forward_derivative],
            together=1,
            # Forward mode of a rule as long as that of a root takes TensorFlow five seconds.
            valid=lambda name, _, mode: (
                mode is not (forward_derivative if name == "implicit_root" else derivative)
                or name in FIRST_ORDER.keys() - IN_THE_MATRIX
            ),
        ),
    )
    def test_first_derivatives(self, name, inside, mode):
        twice = tf.asinh(POINTS)
        expected = (exact(1) * exact(1, twice)).numpy()
        f = inside(ALL[name])
        assert verdict(tf.function(mode(f)), expected) == "right"
        assert verdict(mode(tf.function(f)), expected) == "right"
        if inside is looped:  # XLA compiles the graph that has just run, and loops in its own way
            promised = LOUD if name in CALLS_HOST else {"right"}
            assert verdict(compiled(mode(f)), expected) in promised


class TestRulesThatCallFunctions:
    """And forms, their own among them."""

    CALLS = {
        "tf.function": lambda form, x: tf.function(form)(x),
        "tf.cond": lambda form, x: tf.cond(tf.norm(x) < 1e6, lambda: form(x), lambda: x),
        "tf.while_loop": lambda form, x: tf.while_loop(
            lambda i, _: i < 1, lambda i, _: (i + 1, form(x)), (0, tf.zeros_like(x))
        )[1],
    }

    @pytest.mark.parametrize(
        ("name", "call", "way"), spread(["with_gradient", "custom_jvp"], CALLS, FIRST_WAYS)
    )
    def test_rules_that_call_their_function(self, name, call, way):
        form = OF_SLOPE[name](misled(tf.exp), lambda x: self.CALLS[call](form, x))
        assert verdict(FIRST_WAYS[way](form), np.exp(POINTS)) == "right"

    @pytest.mark.parametrize(
        ("call", "way"),
        spread(
            CALLS,
            FIRST_WAYS,
            together=1,
            valid=lambda call, way: (  # in other functions branches and loops take long
                call == "tf.function" or way in ("eager", "forward", "forward in tf.function")
            ),
        ),
    )
    def test_a_jvp_rule_that_needs_itself_does_not_recurse(self, call, way):
        double = sgtrick.custom_jvp(lambda x: 2 * x)
        double.defjvp(lambda primals, tangents: (None, self.CALLS[call](double, *tangents)))
        # An error would be that of the recursion: what is unknown is NaN in all these cases.
        assert verdict(FIRST_WAYS[way](double), np.full(3, 2.0)) in {"right", "NaN"}

    @pytest.mark.parametrize("way", FIRST_WAYS)
    def test_a_decorated_function_in_a_rule_closes_over_its_argument(self, way):
        def slope_of(x):
            return sgtrick.custom_vjp(lambda y: (slope(y), lambda u: -u * tf.sin(x)))(x)

        form = sgtrick.with_gradient(hidden, slope_of)
        assert verdict(FIRST_WAYS[way](form), exact(1)) == "right"


class TestMapped:
    """Every form and trick by `tf.vectorized_map` without a loop."""

    @pytest.mark.parametrize(
        ("name", "way"),
        spread(
            ALL,
            MAPPED,
            together=1,
            valid=lambda name, way: (
                way == "forward mode inside"
                if name in IN_THE_MATRIX
                else (name, way) != ("implicit_root", "forward mode around")  # which takes minutes
            ),
        ),
    )
    def test_first_derivatives(self, name, way):
        promised = LOUD if "XLA" in way and name in CALLS_HOST else {"right"}
        assert verdict(maps(map_of(name))[way](ALL[name]), exact(1)) in promised

    @pytest.mark.parametrize(("name", "wrap"), spread(EVERY_ORDER, EXECUTED.values(), together=1))
    def test_forward_mode_of_one_member(self, name, wrap):
        """Which TensorFlow gathers, so that its gradient is not dense."""
        x = POINTS[:1]
        run = forward_derivative(wrap(map_of(name)(ALL[name])))
        assert verdict(run, exact(1, x), x) == "right"

    @pytest.mark.parametrize(
        ("name", "wrap"),
        spread(
            [*EVERY_ORDER, "custom_gradient", "from_numpy", "custom_vjp, host"],
            [*EXECUTED.values(), compiled],
            together=1,
        ),
    )
    def test_nested(self, name, wrap):
        x = np.stack([POINTS, 2 * POINTS])
        map_ = map_of(name)
        run = wrap(derivative(map_(map_(ALL[name]))))
        promised = LOUD if wrap is compiled and name in CALLS_HOST else {"right"}
        assert verdict(run, exact(1, x), x) in promised
