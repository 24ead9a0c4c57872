"""Differences tell kinks from curvature and noise, and say how accurate they are."""

import re
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from checked_functions import MODES, density, report
from matrix import spread
from sgtrick import check_gradient
from sgtrick._check import finite_differences
from shared import constant


def kinked(x):
    return -tf.abs(x) + tf.exp(x)


class TestKinks:
    @pytest.mark.parametrize(("f", "mode"), [(tf.abs, "random"), (kinked, "full")])
    def test_are_reported(self, f, mode):
        found = check_gradient(f, constant(0.0), mode=mode)
        assert {entry.verdict for entry in found.entries} == {"kink"}
        assert "no derivative" in str(found)

    def test_one_sided_slopes_are_shown(self):
        (entry,) = check_gradient(lambda x: tf.maximum(-x, 3 * x), constant(0.0)).entries
        assert entry.remark == "-1 | 3"

    @pytest.mark.parametrize(
        ("slope", "verdict"), [(-1.1, "wrong"), (1.1, "wrong"), (np.nan, "refused")]
    )
    def test_no_slope_outside_is_excused(self, slope, verdict):
        f = sgtrick.with_gradient(lambda x: tf.abs(x), lambda x: constant(slope))
        assert report(f, constant(0.0)).worst.verdict == verdict

    @pytest.mark.parametrize("x", [1e-5, -1e-3, 0.2])
    def test_beside_one_the_derivative_is_seen(self, x):
        assert check_gradient(lambda x: 3 * tf.nn.relu(x) + x, constant(x)).worst.verdict == "ok"
        wrong = sgtrick.with_gradient(
            lambda x: tf.nn.relu(x), lambda x: 0.99 * tf.cast(x > 0, x.dtype) + 0.01
        )
        assert report(wrong, constant(x)).worst.verdict == ("wrong" if x < 0 else "ok")

    def test_autodiff_is_wrong_where_two_kinks_cancel(self):
        def f(x):  # x, but autodiff says 0 at 0
            return tf.nn.relu(x) - tf.nn.relu(-x)

        entry = report(f, constant(0.0)).worst
        assert (entry.verdict, entry.embedded) == ("wrong", 0.0)
        assert entry.numerical == pytest.approx(1.0)

    def test_smooth_curvature_is_no_kink(self):
        assert check_gradient(lambda x: tf.sqrt(x**2 + 1e-4), constant(0.0)).worst.verdict == "ok"
        assert check_gradient(lambda x: tf.abs(x) ** 1.5, constant(0.0)).worst.verdict == "ok"
        assert check_gradient(tf.sin, constant(1e-300)).evaluations < 150

    def test_value_and_slope_are_both_zero(self):
        assert check_gradient(lambda x: tf.reduce_sum(x**3), constant([0.0, 0.0]), order=2).passed
        off = sgtrick.with_gradient(lambda x: x**3, lambda x: 3 * x**2 + 1e-6)
        assert report(off, constant(0.0)).worst.verdict == "wrong"

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    @pytest.mark.parametrize(
        "f",
        [
            lambda x: tf.nn.relu(x) ** 2,
            lambda x: x * tf.abs(x),
            lambda x: 1e3 * tf.nn.relu(-x) ** 2 + 5,
            lambda x: tf.where(x > 0, x**3, -(x**2)),
        ],
    )
    def test_what_is_flat_and_bends_at_once(self, f, dtype):
        x = tf.constant(0.0, dtype)
        assert check_gradient(f, x).worst.verdict == "ok"
        off = sgtrick.with_gradient(f, lambda x: x + 1e-3)
        assert report(off, x).worst.verdict == "wrong"

    def test_a_jump_cannot_be_told(self):
        with pytest.raises(sgtrick.GradientCheckError, match="could not be checked") as caught:
            check_gradient(tf.sign, constant(0.0))
        assert caught.value.report.worst.verdict == "cannot tell"


def rounded(f, dtype):
    """`f` of float64, computed in another dtype."""
    return lambda x: tf.cast(f(tf.cast(x, dtype)), tf.float64)


FAST = {  # beside the size of x
    "years": (lambda t: tf.sin(2 * np.pi * t / 0.02), 2024.3),
    "days": (lambda t: tf.cos(t / 5) + tf.sin(2 * np.pi * t / 3), 2460000.5),
    "metres": (lambda x: tf.exp(-(((x - 5400010) / 30) ** 2)), 5.4e6),
    "Hz": (lambda f: 1 / (1 + ((f - 1e9 - 300) / 1e3) ** 2), 1e9),
    "seconds": (lambda t: tf.sin(2 * np.pi * t / 3600) + t / 1e9, 1.7e9),
    "a step": (lambda x: x + tf.tanh(1e6 * (x - 1)), 1.0),
    "a ripple": (lambda x: tf.sin(x) + 1e-3 * tf.sin(1e5 * x), 1.3),
}


class TestFastFunctions:
    @pytest.mark.long
    @pytest.mark.parametrize(("case", "mode"), spread(FAST, ["full", "random"], together=1))
    def test_the_gradient_is_told_from_one_that_is_1_percent_off(self, case, mode):
        f, x = FAST[case]
        x = constant([x])
        assert {e.verdict for e in check_gradient(f, x, mode=mode).entries} == {"ok"}

        def off(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            return 1.01 * tape.gradient(y, x)

        wrong = tf.function(sgtrick.with_gradient(f, off, batch_ndims=1))
        assert report(wrong, x, mode=mode).worst.verdict == "wrong"

    def test_noise_is_no_fast_function(self):
        f = sgtrick.with_gradient(
            lambda x: tf.sin(x) + 1e-6 * tf.sin(1e15 * x), lambda x: tf.cos(x)
        )
        found = check_gradient(f, constant(0.5))
        assert found.worst.steps.min() > 1e-8


class TestJumps:
    """Values that were computed in a lower precision than their dtype's do not move at all, or not
    smoothly, at small steps: what these show is no derivative.
    """

    @pytest.mark.parametrize(("prior", "mode"), [("float32", "full"), ("float64", "random")])
    def test_a_likelihood_in_float32_whose_prior_has_no_gradient_is_wrong(self, prior, mode):
        def f(x):
            value = tf.cast(tf.reduce_sum(tf.sin(x)) - 2e3, tf.float32)
            prior_ = tf.cast(-2 * tf.reduce_sum(x), prior)
            return tf.cast(tf.cast(value, prior) + prior_, tf.float64)

        x = constant([0.5, 2.0])
        for slope, verdicts in [(-2.0, {"ok", "cannot tell"}), (0.0, {"wrong"})]:
            h = tf.function(sgtrick.with_gradient(f, lambda x, slope=slope: tf.cos(x) + slope))
            found = report(h, x, mode=mode)
            assert {entry.verdict for entry in found.entries} <= verdicts
            assert "The values of f move by jumps of" in str(found)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_right_gradient_passes_over_steps_that_are_large_enough(self, dtype):
        f = rounded(lambda x: 4 + 2 * x, dtype)
        found = check_gradient(f, constant(1.3), max_step=2.0)
        assert found.worst.numerical == pytest.approx(2.0, rel=0.1)
        wrong = sgtrick.with_gradient(f, lambda x: 0.5 * tf.ones_like(x))
        assert report(wrong, constant(1.3), max_step=2.0).worst.verdict == "wrong"

    def test_what_moves_at_no_step_is_no_proof(self):
        f = sgtrick.with_gradient(rounded(lambda x: 5e4 / 3 + 1e-3 * x, "float32"), lambda x: 0 * x)
        assert report(f, constant(1.0)).worst.verdict == "cannot tell"

    @pytest.mark.parametrize("distance", [1e-4, 3e-3])
    def test_what_is_flat_nearby_and_begins_continuously_is_flat(self, distance):
        found = check_gradient(lambda x: tf.nn.relu(x - 1 - distance), constant(1.0))
        assert found.worst.numerical == 0.0
        assert not found.notes

    def test_a_jump_of_the_function_itself_is_no_rounding(self):
        f = sgtrick.with_gradient(lambda x: tf.sin(x) + tf.floor(x), lambda x: 1.01 * tf.cos(x))
        assert report(f, constant(0.999)).worst.verdict == "wrong"


def cross_entropy(x):
    logits = tf.nn.softmax_cross_entropy_with_logits
    return tf.reduce_sum(logits(tf.constant([1.0, 0.0, 0.0], x.dtype), x))


SATURATED = {
    "cross-entropy": (cross_entropy, np.float32([12.0, 0.0, 0.5])),
    "of larger logits": (cross_entropy, np.float32([1015.0, 1000.0, 999.0])),
    "1 - sigmoid": (lambda x: tf.reduce_sum(1 - tf.sigmoid(x)), np.float32([12.0, 9.0])),
    "1 - tanh, of another size": (lambda x: 1e4 * tf.reduce_sum(1 - tf.tanh(x)), np.float32([6.0])),
    "log of sigmoid": (lambda x: tf.reduce_sum(tf.math.log(tf.sigmoid(x))), np.float32([11.0])),
}


def raising(f, is_inside):
    @sgtrick.from_numpy
    def engine(x):
        if not np.all(is_inside(x)):
            raise ValueError("outside")
        return f(x)

    return engine


DOMAINS = {
    "not a number": (tf.math.log, [1e-3, 1e-9], ""),
    "an assertion": (
        lambda x: tfp.distributions.Gamma(constant(2.0), 1.0, validate_args=True).log_prob(x),
        0.05,
        "f raises beside x, .*: InvalidArgumentError",
    ),
    "an engine": (
        raising(lambda x: (np.sum(np.log(x)), 1 / x), lambda x: x > 0),
        [0.05],
        "f raises beside x, .*: RuntimeError: engine raised ValueError: outside",
    ),
    "on the other side": (
        raising(lambda x: (np.sum(np.arcsin(x)), 1 / np.sqrt(1 - x**2)), lambda x: abs(x) <= 1),
        [0.97],
        "f raises beside x",
    ),
}
BORDERS = {
    "xlogy": (lambda x: tf.math.xlogy(x, x), 0.0),
    "x**1.5": (lambda x: tf.reduce_sum(x**1.5), [0.0, 1.0]),
    "an engine": (
        raising(lambda x: (np.sum(np.log1p(x)), 1 / (1 + x)), lambda x: x >= 0),
        [0.0, 0.5],
    ),
    "on the other side": (lambda x: (1 - x) ** 2.5, 1.0),
}


class TestPrecision:
    def test_float32_is_checked_in_float64(self):
        found = check_gradient(tf.sin, tf.constant(0.5))
        assert found.worst.uncertainty < 1e-9
        assert any("differences in float64" in note for note in found.notes)

    def test_float32_alone_says_what_it_decides(self):
        two = tf.constant(2.0)
        found = check_gradient(lambda x: tf.sin(two * x), tf.constant([0.5]))
        assert 1e-7 < found.worst.uncertainty < 1e-3
        (note,) = found.notes
        assert "evaluated in float32, because in float64 it raises" in note
        wrong = sgtrick.with_gradient(lambda x: tf.sin(two * x), lambda x: 2.02 * tf.cos(two * x))
        assert report(wrong, tf.constant([0.5])).worst.verdict == "wrong"

    def test_float32_that_cannot_decide(self):
        big = tf.constant(1e6)
        found = report(lambda x: big + tf.sin(x), tf.constant(0.5))
        assert found.worst.verdict == "cannot tell"
        assert check_gradient(lambda x: 1e6 + tf.sin(x), tf.constant(0.5)).passed  # in float64

    @pytest.mark.long
    def test_rounding_of_float32_is_told_from_errors(self):
        """Where tanh is almost 1, its gradient in float32 has few digits, but only there."""

        def slope(x):
            return 5 * (1 - tf.tanh(5 * x) ** 2)

        def off_by(error, dtypes):
            def grad(x):
                return slope(x) + (error(x) if x.dtype in dtypes else 0 * x)

            return tf.function(sgtrick.with_gradient(lambda x: tf.tanh(5 * x), grad, batch_ndims=1))

        x = tf.constant([1.5, -2.0])
        for dtypes in ([tf.float32], [tf.float32, tf.float64]):
            for error, verdict in [
                (lambda x: 0 * x, "ok"),
                (lambda x: 1e-4 * tf.ones_like(x), "wrong"),  # more than rounding of a value of 1
            ]:
                found = report(off_by(error, dtypes), x)
                assert found.worst.verdict == verdict
        in_both = off_by(lambda x: 0.5 * slope(x), [tf.float32, tf.float64])
        assert report(in_both, x).worst.verdict == "wrong"
        with_atol = report(off_by(lambda x: 0 * x, []), x, atol=0.0)
        assert with_atol.worst.verdict == "wrong"  # the caller's tolerance is not widened

    @pytest.mark.parametrize("case", SATURATED)
    def test_what_saturates_in_float32_is_rounding(self, case):
        f, x = SATURATED[case]
        x = tf.constant(x)
        assert {e.verdict for e in check_gradient(f, x).entries} == {"ok"}

        @sgtrick.custom_vjp
        def wrong(x):  # in float64, too
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            slope = tape.gradient(y, x)
            return y, lambda u: 2 * u * slope

        assert report(tf.function(wrong), x).worst.verdict == "wrong"

    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
    @pytest.mark.parametrize("how", ["float32", "as float64", "a mask"])
    def test_constants_in_float32_loosen_nothing(self, how, wrap):
        labels = tf.constant([0.3, 0.7])
        if how == "as float64":
            labels = tf.cast(labels, tf.float64)
        if how == "a mask":
            labels = tf.cast(labels > 0.5, tf.float16)

        def f(factor):
            loss = sgtrick.with_gradient(lambda x: tf.reduce_sum(x**3), lambda x: factor * 3 * x**2)
            return wrap(lambda x: {"loss": loss(x), "labels": labels})

        x = constant([0.5, 0.2])
        assert {e.verdict for e in check_gradient(f(1.0), x).entries} == {"ok"}
        found = report(f(1 + 1e-5), x)
        assert {e.name for e in found.entries if e.verdict == "wrong"} == {
            f"y['loss'] by x[{i}]" for i in range(2)
        }

    @pytest.mark.parametrize(
        ("f", "why"),
        [
            (lambda x: tf.cast(tf.sin(x), tf.float32), "does not return float64"),
            (
                lambda x: tf.sin(x) * (1 if x.dtype == tf.float32 else 2),
                "value in float64 differs",
            ),
        ],
    )
    def test_why_not_float64(self, f, why):
        (note,) = check_gradient(f, tf.constant(0.5)).notes
        assert why in note

    def test_estimated_errors_are_honest(self):
        """The true error of the differences is below twice the estimate, as verdicts have it."""
        rng = np.random.default_rng(0)
        for _ in range(100):
            rate, shift, noise = 10 ** rng.uniform(-2, 2), rng.normal(), 10 ** rng.uniform(-16, -3)
            x = rng.normal()

            def f(t, rate=rate, shift=shift, noise=noise, x=x):
                u = rate * (x + t) + shift
                return np.array([np.sin(u) + noise * np.sin(1e17 * u)]), t

            steps, finest = finite_differences.sweep(abs(x), abs(x), None)
            value = f(0.0)[0]
            rounding = 2e-16 * np.abs(value)
            quotients = finite_differences.quotients(f, value, steps, rounding, finest)
            found = finite_differences.estimated(quotients, quotients.jumps)
            truth = rate * np.cos(rate * x + shift)
            assert abs(found.derivative[0] - truth) < 2 * found.error[0]

    def test_max_step(self):
        def fast(x):  # with ripples
            return tf.sin(x) + 1e-4 * tf.stop_gradient(tf.sin(1e3 * x))

        assert check_gradient(fast, constant(0.5), max_step=(0.02, 1.0), rtol=0.05).passed
        assert report(fast, constant(0.5), max_step=1e-6).worst.verdict == "wrong"
        steps = check_gradient(tf.sin, constant(0.5), max_step=(1e-4, 1e-2)).worst.steps
        assert steps.max() == pytest.approx(1e-2)
        assert 1e-4 / 4 < steps.min() <= 1e-4

    @pytest.mark.parametrize("case", DOMAINS)
    @MODES
    def test_steps_outside_the_domain_are_left_out(self, case, mode):
        f, x, message = DOMAINS[case]
        found = check_gradient(f, constant(x), mode=mode)
        assert {e.verdict for e in found.entries} == {"ok"}
        assert re.search(message, str(found))

    @pytest.mark.parametrize("case", BORDERS)
    @MODES
    def test_a_border_is_said(self, case, mode):
        f, x = BORDERS[case]
        with pytest.raises(sgtrick.GradientCheckError, match="at a border") as caught:
            check_gradient(f, constant(x), mode=mode)
        message = str(caught.value)
        assert "Move x away from the border" in message
        assert "float64" not in message.partition("\n")[2]


class TestCost:
    @pytest.mark.long
    def test_second_derivatives_of_many_entries_take_no_matrix(self):
        x = constant(1 + np.random.default_rng(0).uniform(size=4000))
        tracemalloc.start()
        try:
            assert check_gradient(tf.sin, x, mode="random", order=2).passed
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4000**2

    def test_random_mode_does_not_depend_on_dimension(self):
        def count(n):
            calls = 0

            def f(x):
                nonlocal calls
                calls += 1
                return tf.reduce_sum(tf.sin(x))

            x = constant(1 + np.random.default_rng(0).uniform(size=n))
            found = check_gradient(f, x, mode="random")
            assert found.evaluations == calls
            return found.evaluations

        assert count(10) == count(1000) < 300

    def test_full_mode_is_linear(self):
        few, many = (check_gradient(density, constant([[1.0] * n])).evaluations for n in (2, 8))
        assert many < 5 * few
