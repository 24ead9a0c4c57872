"""`check_gradient` finds wrong gradients, passes right ones, and says where it cannot tell."""

import importlib.util
import pickle
import re
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from matrix import spread
from sgtrick import check_gradient
from sgtrick._check import finite_differences, random_mode

ROOT = Path(__file__).parents[2]
MODES = pytest.mark.parametrize("mode", ["full", "random"])
matplotlib.use("Agg")


def constant(value):
    return tf.constant(value, tf.float64)


def report(f, x, **options):
    return check_gradient(f, x, raise_exception=False, **options)


def load_rates():
    path = ROOT / "tests" / "benchmarks" / "check_gradient_rates.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def density(x):  # [..., 3] -> [...]
    return -tf.reduce_sum(x**4, -1) / 4 + tf.sin(x[..., 0] * x[..., 1])


@tf.function(autograph=False)
def density_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = density(x)
    return tape.gradient(y, x)


@sgtrick.custom_jvp
def by_jvp(x):
    return tf.sin(x)


@by_jvp.defjvp
def _(primals, tangents):
    return tf.sin(*primals), tf.cos(*primals) * tangents[0]


def named_arguments(data, n, scale):
    return {"a": data["u"] * scale**n, "b": [tf.reduce_sum(data["v"][0]), n]}


RIGHT = {
    "native, scalar": (lambda x: tf.reduce_sum(tf.sin(x)), constant([0.5, 2.0])),
    "native, batch": (density, constant([[0.5, 2.0, -1.0], [0.3, 0.1, 0.7]])),
    "tf.function": (tf.function(density), constant([0.5, 2.0, -1.0])),
    "XLA": (tf.function(density, jit_compile=True), constant([0.5, 2.0, -1.0])),
    "matrix": (tf.linalg.inv, constant([[2.0, 0.3], [0.1, 1.0]])),
    "with_gradient": (
        sgtrick.with_gradient(density, density_gradient),
        constant([[0.5, 2.0, -1.0], [0.3, 0.1, 0.7]]),
    ),
    "custom_gradient": (
        lambda x: sgtrick.custom_gradient(density(x), density_gradient(x), x),
        constant([[0.5, 2.0, -1.0], [0.3, 0.1, 0.7]]),
    ),
    "custom_jvp": (by_jvp, constant([0.5, 2.0])),
    "custom_vjp": (
        sgtrick.custom_vjp(lambda x: (tf.exp(x), lambda u: u * tf.exp(x))),
        constant([0.5, 2.0]),
    ),
    "from_numpy": (
        sgtrick.from_numpy(lambda x: (np.sum(x**3), 3 * x**2)),
        constant([[0.5, 2.0], [1.0, -1.0]]),
    ),
    "value and gradient": (
        sgtrick.from_value_and_gradient(lambda x: (density(x), density_gradient(x))),
        constant([[0.5, 2.0, -1.0], [0.3, 0.1, 0.7]]),
    ),
    "value and gradient, NumPy": (
        sgtrick.from_value_and_gradient(lambda x: (np.sum(np.square(x)), 2 * np.asarray(x))),
        np.array([0.5, 2.0]),
    ),
    "value and gradient, arguments": (
        sgtrick.from_value_and_gradient(lambda a, b: (a * b, (b, a)), argnums=(0, 1)),
        (constant(3.0), constant(4.0)),
    ),
    "distribution": (
        lambda loc, x: tfp.distributions.StudentT(3.0, loc, 2.0).log_prob(x),
        (tf.constant(0.3), tf.constant([0.1, 5.0])),
    ),
    "structures, integers, variables": (
        named_arguments,
        ({"u": tf.Variable([1.0, 2.0]), "v": [constant(2.0)]}, 3, 1.5),
    ),
    "float16": (tf.sin, tf.constant([0.5, 2.0], tf.float16)),
    "bfloat16": (tf.sin, tf.constant([0.5, 2.0], tf.bfloat16)),
    "one bfloat16": (tf.sin, tf.constant(0.5, tf.bfloat16)),
    "no entries in one leaf": (
        lambda a, b: tf.reduce_sum(a) + b,
        (tf.zeros([0]), tf.constant(1.0)),
    ),
}


class TestRight:
    @pytest.mark.parametrize(("case", "mode"), spread(RIGHT, ["full", "random"], together=1))
    def test_passes(self, case, mode):
        found = check_gradient(*RIGHT[case], mode=mode)
        assert found.passed
        assert {entry.verdict for entry in found.entries} == {"ok"}

    def test_entries_are_those_of_the_jacobian(self):
        a = np.random.default_rng(0).normal(size=(3, 2))
        found = check_gradient(lambda x: tf.linalg.matvec(a, x), constant([0.5, 2.0]))
        entries = {entry.name: entry for entry in found.entries}
        assert sorted(entries) == sorted(f"y[{i}] by x[{j}]" for i in range(3) for j in range(2))
        for i, j in np.ndindex(3, 2):
            entry = entries[f"y[{i}] by x[{j}]"]
            np.testing.assert_allclose([entry.embedded, entry.numerical], a[i, j], rtol=1e-9)

    def test_paths(self):
        names = {
            entry.name
            for entry in check_gradient(*RIGHT["structures, integers, variables"]).entries
        }
        assert "y['a'][1] by x[0]['u'][1]" in names
        assert "y['b'][0] by x[0]['v'][0]" in names
        assert "y['a'][0] by x[2]" in names

    def test_a_plain_tuple_is_several_arguments_and_a_list_one(self):
        assert check_gradient(lambda a, b: a * b, (2.0, 3.0)).passed
        assert check_gradient(lambda ab: ab[0] * ab[1], [2.0, 3.0]).passed
        assert check_gradient(lambda a: a[0] * a[1], ((2.0, 3.0),)).passed

    @MODES
    @pytest.mark.parametrize("scale", [1e-12, 1e12])
    def test_scaled_values(self, scale, mode):
        def f(x):
            return scale * density(x)

        x = constant([0.5, 2.0, -1.0])
        assert check_gradient(f, x, mode=mode).passed
        wrong = sgtrick.with_gradient(f, lambda x: 1.01 * scale * density_gradient(x))
        assert report(wrong, x, mode=mode).worst.verdict == "wrong"

    @MODES
    def test_scaled_arguments(self, mode):
        sizes = np.array([1e-12, 1.0, 1e6])

        def f(x):
            return tf.reduce_sum(tf.math.log(x) ** 2)

        x = constant(sizes * [1.5, 2.0, 3.0])
        assert check_gradient(f, x, mode=mode).passed
        wrong = sgtrick.with_gradient(f, lambda x: 2.02 * tf.math.log(x) / x)
        assert report(wrong, x, mode=mode).worst.verdict == "wrong"

    @MODES
    @pytest.mark.parametrize("noise", [1e-10, 1e-8, 1e-6])
    def test_noise(self, noise, mode):
        def f(x):
            return density(x) + noise * tf.stop_gradient(tf.sin(1e9 * tf.reduce_sum(x)))

        x = constant([0.5, 2.0, -1.0])
        assert check_gradient(f, x, mode=mode).passed
        wrong = sgtrick.with_gradient(f, lambda x: 1.01 * density_gradient(x))
        assert report(wrong, x, mode=mode).worst.verdict == "wrong"

    def test_rounded_values(self):  # of a solver that prints six digits
        f = sgtrick.with_gradient(
            lambda x: tf.reduce_sum(tf.round(1e6 * tf.sin(x)) / 1e6), lambda x: tf.cos(x)
        )
        assert check_gradient(f, constant([0.5, 2.0])).passed

    @MODES
    def test_narrow_function(self, mode):  # over large steps it is as good as constant
        x = constant([1e-5, -2e-5])
        assert check_gradient(lambda x: tf.exp(-tf.reduce_sum((1e5 * x) ** 2)), x, mode=mode).passed

    def test_a_solver_passes_when_told(self):
        @tf.function
        def solve(rate):  # y' = -rate y by the midpoint rule, from 0 to 1
            y, h = tf.ones_like(rate), 0.02
            for _ in range(50):
                y -= h * rate * (y - h / 2 * rate * y)
            return y

        # The adjoint of the continuous equation, not of the discrete one.
        f = sgtrick.with_gradient(solve, lambda rate: -tf.exp(-rate))
        rate = constant(0.7)
        found = report(f, rate)
        assert found.worst.verdict == "wrong"
        assert 3e-5 < found.worst.relative < 3e-4
        assert check_gradient(f, rate, rtol=1e-3).passed
        assert check_gradient(f, rate, atol=1e-3).passed
        assert report(f, rate, rtol=1e-5, atol=1e-6).worst.verdict == "wrong"


SPOILED = {
    "1 % off": lambda x: 1.01 * density_gradient(x),
    "sign": lambda x: -density_gradient(x),
    "zero": lambda x: 0 * density_gradient(x),
    "one entry": lambda x: density_gradient(x) * constant([1.0, 1.0, 1.01]),
    "reversed": lambda x: density_gradient(x)[..., ::-1],
    "another point": lambda x: density_gradient(x + 0.01),
    "mean over the batch": lambda x: density_gradient(x) / 2,
    "another member's": lambda x: density_gradient(x)[::-1],
    "not a number": lambda x: density_gradient(x) * np.nan,
}


class TestWrong:
    @MODES
    @pytest.mark.parametrize("how", SPOILED)
    def test_is_found(self, how, mode):
        x = constant([[0.5, 2.0, -1.0], [0.3, 0.1, 0.7]])
        f = tf.function(sgtrick.with_gradient(density, SPOILED[how]))
        verdict = "refused" if how == "not a number" else "wrong"
        message = f"The gradient is {verdict}"
        with pytest.raises(sgtrick.GradientCheckError, match=message) as caught:
            check_gradient(f, x, mode=mode)
        assert caught.value.report.worst.verdict == verdict

    @MODES
    @pytest.mark.parametrize(
        ("dtype", "size", "verdicts"),
        [
            ("float64", 1e-300, {"wrong"}),
            ("float32", 1e-30, {"wrong"}),
            ("float16", 1e-4, {"wrong"}),
            ("float16", 1e-6, {"wrong", "cannot tell"}),  # of which it holds one digit
        ],
    )
    def test_of_a_tiny_function_is_found(self, dtype, size, verdicts, mode):
        f = sgtrick.with_gradient(
            lambda x: tf.constant(size, dtype) * tf.reduce_sum(x),
            lambda x: tf.constant(2 * size, dtype) * tf.ones_like(x),
        )
        assert report(f, tf.constant([1.0, 2.0], dtype), mode=mode).worst.verdict in verdicts

    @MODES
    @pytest.mark.parametrize("how", ["1 % off", "one entry", "another member's"])
    def test_is_found_in_value_and_gradient(self, how, mode):
        x = constant([[0.5, 2.0, -1.0], [0.3, 0.1, 0.7]])
        f = sgtrick.from_value_and_gradient(lambda x: (density(x), SPOILED[how](x)))
        assert report(f, x, mode=mode).worst.verdict == "wrong"

    @MODES
    def test_tfps_own_custom_gradient_of_a_batch(self, mode):
        def f(x):
            return tfp.math.custom_gradient(density(x), density_gradient(x), x)

        x = constant([[0.5, 2.0, -1.0], [0.3, 0.1, 0.7]])
        assert report(f, x, mode=mode).worst.verdict == "wrong"

    @MODES
    def test_transposed_jacobian(self, mode):
        a = np.random.default_rng(0).normal(size=(3, 3))
        f = sgtrick.with_gradient(lambda x: tf.linalg.matvec(a, x), lambda x: constant(a.T))
        x = constant([0.5, 2.0, -1.0])
        found = report(f, x, mode=mode)
        assert found.worst.verdict == "wrong"
        right = sgtrick.with_gradient(lambda x: tf.linalg.matvec(a, x), lambda x: constant(a))
        assert check_gradient(right, x, mode=mode).passed

    @MODES
    def test_zipf(self, mode):
        def f(power):
            return tf.reduce_sum(tfp.distributions.Zipf(power).log_prob([1.0, 1.0, 2.0, 5.0]))

        worst = report(f, constant(2.0), mode=mode).worst
        assert worst.verdict == "wrong"
        size = 1 if mode == "full" else np.sign(worst.numerical) * -1
        assert worst.embedded == pytest.approx(-2.303 * size, abs=1e-3) or mode == "random"
        if mode == "full":
            assert worst.numerical == pytest.approx(-0.023, abs=1e-3)

    def test_one_entry_in_hundreds(self):
        mask = np.ones(300)
        mask[217] = 1.01
        f = sgtrick.with_gradient(
            lambda x: tf.reduce_sum(tf.sin(x)), lambda x: tf.cos(x) * constant(mask)
        )
        x = constant(np.random.default_rng(0).uniform(0.5, 1.0, 300))
        found = report(tf.function(f), x, max_step=(1e-4, 0.1))  # fewer steps than usual, for time
        assert [entry.name for entry in found.entries if entry.verdict == "wrong"] == ["x[217]"]
        assert len(found.entries) == 300

    @pytest.mark.parametrize("off", [1e-2, -2.0])
    def test_one_entry_in_a_thousand_is_in_every_random_direction(self, off):
        f = tf.function(wrong_in({617: off}))
        for seed in range(5):
            found = report(f, constant(np.ones(1000)), mode="random", seed=seed)
            assert found.count("wrong") == len(found.entries)

    def test_two_entries_cancel_in_half_of_the_random_directions(self, monkeypatch):
        f, x = tf.function(wrong_in({1: 0.1, 617: 0.1})), constant(np.ones(1000))
        for seed in range(5):  # 2**-10 each for being missed
            assert report(f, x, mode="random", seed=seed).worst.verdict == "wrong"
        monkeypatch.setattr(random_mode, "DIRECTIONS", 1)
        verdicts = [report(f, x, mode="random", seed=s).worst.verdict for s in range(40)]
        assert set(verdicts) == {"wrong", "ok"}
        assert 10 <= verdicts.count("ok") <= 30  # three standard deviations


def wrong_in(errors):
    off = np.zeros(1000)
    for place, error in errors.items():
        off[place] = error
    return sgtrick.with_gradient(
        lambda x: tf.reduce_sum(tf.sin(x)), lambda x: tf.cos(x) + constant(off)
    )


class TestTheSameTensorTwice:
    """As two arguments it is two points, whose gradients are not added up."""

    X = constant([1.0, 2.0, -3.0])

    @MODES
    @pytest.mark.parametrize("pack", [tuple, list])
    @pytest.mark.parametrize("order", [1, 2])
    def test_native(self, pack, order, mode):
        f = {
            tuple: lambda a, b: tf.reduce_sum(a * b**2),
            list: lambda x: tf.reduce_sum(x[0] * x[1] ** 2),
        }[pack]
        assert check_gradient(f, pack([self.X, self.X]), order=order, mode=mode).passed

    @MODES
    @pytest.mark.parametrize("x", [X, tf.cast(X, tf.float32)], ids=["float64", "float32"])
    @pytest.mark.parametrize(
        "grad", [lambda a, b: (b, None), lambda a, b: (b / 2, a / 2)], ids=["none", "halves"]
    )
    def test_wrong_gradients_of_the_right_sum(self, grad, x, mode):
        @sgtrick.custom_vjp
        def f(a, b):
            return tf.reduce_sum(a * b), lambda u: [g if g is None else u * g for g in grad(a, b)]

        assert report(f, (x, x), mode=mode).worst.verdict == "wrong"

    @MODES
    def test_that_the_function_reads_too(self, mode):
        """The differences do not move what is not an argument, so neither may the tape."""
        assert check_gradient(lambda x: tf.reduce_sum(x * self.X), self.X, mode=mode).passed


class TestUnconnected:
    @MODES
    def test_counts_as_zero_and_is_said(self, mode):
        def f(a, b):
            return tf.reduce_sum(a) + tf.stop_gradient(b)

        found = report(f, (constant([1.0, 2.0]), constant(3.0)), mode=mode)
        assert found.worst.verdict == "wrong"
        message = r"No gradient with respect to x\[1\].*None"
        assert any(re.search(message, note) for note in found.notes)
        if mode == "full":
            assert (found.worst.name, found.worst.remark) == ("x[1]", "no gradient")
            assert found.count("wrong") == 1

    @MODES
    def test_is_right_where_the_derivative_is_zero(self, mode):
        found = check_gradient(lambda a, b: a + 0.0, (constant(1.0), constant(3.0)), mode=mode)
        assert any("No gradient with respect to x[1]" in note for note in found.notes)

    @MODES
    def test_constant_function(self, mode):
        assert check_gradient(lambda x: constant(7.0), constant([1.0, 2.0]), mode=mode).passed


class TestKinks:
    @MODES
    @pytest.mark.parametrize("f", [tf.abs, tf.nn.relu, lambda x: -tf.abs(x) + tf.exp(x)])
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

    @pytest.mark.parametrize("x", [1e-5, -1e-5, 1e-3, -0.03, 0.2])
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

    def test_a_jump_cannot_be_told(self):
        with pytest.raises(sgtrick.GradientCheckError, match="could not be checked") as caught:
            check_gradient(tf.sign, constant(0.0))
        assert caught.value.report.worst.verdict == "cannot tell"


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
        assert re.search(
            "evaluated in float32, because in float64 it raises .*median error .* .e-0", note
        )
        wrong = sgtrick.with_gradient(lambda x: tf.sin(two * x), lambda x: 2.02 * tf.cos(two * x))
        assert report(wrong, tf.constant([0.5])).worst.verdict == "wrong"

    def test_float32_that_cannot_decide(self):
        big = tf.constant(1e6)
        found = report(lambda x: big + tf.sin(x), tf.constant(0.5))
        assert found.worst.verdict == "cannot tell"
        assert check_gradient(lambda x: 1e6 + tf.sin(x), tf.constant(0.5)).passed  # in float64

    @pytest.mark.parametrize("mode", ["full", "random"])
    @pytest.mark.parametrize("x", [[1.5], [1.5, -2.0]])
    def test_rounding_of_float32_is_told_from_errors(self, x, mode):
        """Where tanh is almost 1, its gradient in float32 has few digits, but only there."""

        def slope(x):
            return 5 * (1 - tf.tanh(5 * x) ** 2)

        def off_by(error, dtypes):
            def grad(x):
                return slope(x) + (error(x) if x.dtype in dtypes else 0 * x)

            return sgtrick.with_gradient(lambda x: tf.tanh(5 * x), grad, batch_ndims=1)

        x = tf.constant(x)
        for dtypes in ([tf.float32], [tf.float32, tf.float64]):
            for error, verdict in [
                (lambda x: 0 * x, "ok"),
                (lambda x: 1e-4 * tf.ones_like(x), "wrong"),  # more than rounding of a value of 1
            ]:
                found = report(off_by(error, dtypes), x, mode=mode)
                assert found.worst.verdict == verdict
        in_both = off_by(lambda x: 0.5 * slope(x), [tf.float32, tf.float64])
        assert report(in_both, x, mode=mode).worst.verdict == "wrong"
        with_atol = report(off_by(lambda x: 0 * x, []), x, mode=mode, atol=0.0)
        assert with_atol.worst.verdict == "wrong"  # the caller's tolerance is not widened

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
        """The true error of the differences is below the estimate, over many functions."""
        rng = np.random.default_rng(0)
        for _ in range(300):
            rate, shift, noise = 10 ** rng.uniform(-2, 2), rng.normal(), 10 ** rng.uniform(-16, -3)
            x = rng.normal()

            def f(t, rate=rate, shift=shift, noise=noise, x=x):
                u = rate * (x + t) + shift
                return np.array([np.sin(u) + noise * np.sin(1e12 * u)]), t

            steps = finite_differences.sweep(abs(x), abs(x), None)
            value = f(0.0)[0]
            found = finite_differences.differentiate(f, value, steps, 2e-16 * np.abs(value))
            truth = rate * np.cos(rate * x + shift)
            assert abs(found.derivative[0] - truth) < found.error[0]

    def test_max_step(self):
        def fast(x):  # with ripples
            return tf.sin(x) + 1e-4 * tf.stop_gradient(tf.sin(1e3 * x))

        assert check_gradient(fast, constant(0.5), max_step=(0.02, 1.0), rtol=0.05).passed
        assert report(fast, constant(0.5), max_step=1e-6).worst.verdict == "wrong"
        steps = check_gradient(tf.sin, constant(0.5), max_step=(1e-4, 1e-2)).worst.steps
        assert steps.max() == 1e-2
        assert 1e-4 / 4 < steps.min() <= 1e-4

    def test_steps_outside_the_domain_are_left_out(self):
        assert check_gradient(tf.math.log, constant([1e-3, 1e-9])).passed


class TestOrder2:
    @MODES
    @pytest.mark.parametrize(
        "f", [density, lambda x: tf.sin(x) * tf.reduce_sum(x)], ids=["scalar", "tensor"]
    )
    def test_native(self, f, mode):
        found = check_gradient(f, constant([0.5, 2.0, -1.0]), order=2, mode=mode)
        assert {entry.order for entry in found.entries} == {1, 2}
        assert "order" in str(found)

    @MODES
    def test_twice_the_second_derivative(self, mode):  # the formula naively un-stopped
        def h(x):
            s = tf.stop_gradient(x)
            return tf.sin(s) + tf.cos(x) * (x - s)

        found = report(h, constant(0.5), order=2, mode=mode)
        assert (found.worst.order, found.worst.verdict) == (2, "wrong")
        assert found.worst.embedded == pytest.approx(2 * found.worst.numerical)


class TestCost:
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

        assert count(10) == count(100_000) < 300

    def test_full_mode_is_linear(self):
        few, many = (check_gradient(density, constant([[1.0] * n])).evaluations for n in (2, 20))
        assert many < 11 * few


class TestRefusals:
    def test_not_deterministic(self):
        with pytest.raises(ValueError, match=r"not deterministic.*y was first .* then"):
            check_gradient(lambda x: x * tf.random.uniform([], dtype=x.dtype), constant(1.0))

    @MODES
    def test_a_state_that_changes_later(self, mode):
        calls = iter(range(10**6))

        def f(x):
            return x if next(calls) < 10 else 2 * x

        with pytest.raises(ValueError, match="not deterministic"):
            check_gradient(f, constant(1.0), mode=mode)

    def test_value_is_not_finite(self):
        with pytest.raises(ValueError, match=r"y\[1\], which f returns, is nan at x"):
            check_gradient(tf.math.log, constant([1.0, -1.0]))

    def test_point_is_not_finite(self):
        with pytest.raises(ValueError, match=r"x\['a'\] is not finite"):
            check_gradient(lambda x: x["a"], {"a": constant([1.0, np.inf])})

    def test_complex(self):
        with pytest.raises(TypeError, match=r"x is complex.*real and imaginary"):
            check_gradient(tf.abs, tf.constant(1j))
        with pytest.raises(TypeError, match=r"y, which f returns, is complex.*real"):
            check_gradient(lambda x: tf.complex(x, x), constant(1.0))
        assert check_gradient(
            lambda re, im: tf.abs(tf.complex(re, im)), (constant(1.0), constant(2.0))
        ).passed

    def test_nothing_to_differentiate(self):
        with pytest.raises(TypeError, match="x has nothing to differentiate with respect to"):
            check_gradient(lambda x: x, 3)
        with pytest.raises(TypeError, match="floating and not empty"):
            check_gradient(tf.reduce_sum, tf.zeros([0]))
        with pytest.raises(TypeError, match="f returns nothing of a floating dtype"):
            check_gradient(lambda x: tf.cast(x, tf.int32), 3.0)
        with pytest.raises(TypeError, match="y, the result of <lambda>, must be a tensor"):
            check_gradient(lambda x: None, 3.0)

    def test_in_a_graph(self):
        with pytest.raises(RuntimeError, match="runs eagerly"):
            tf.function(lambda x: check_gradient(tf.sin, x) and x)(constant(1.0))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"order": 3}, "order must be 1 or 2, got 3"),
            ({"mode": "fast"}, "mode must be 'full' or 'random', got 'fast'"),
            ({"rtol": -1.0}, "rtol must be None or a non-negative number"),
            ({"atol": np.nan}, "atol must be None or a non-negative number"),
            ({"max_step": 0.0}, "max_step must be None, the largest step, or a pair"),
            ({"max_step": (1e-2, 1e-4)}, "smallest and the largest step"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            check_gradient(tf.sin, 1.0, **options)

    def test_two_outputs_in_a_tuple(self):
        """Nothing is guessed: they may be a value and its gradient."""
        with pytest.raises(TypeError, match=r"pass sgtrick\.from_value_and_gradient.* as a list"):
            check_gradient(lambda x: (tf.sin(x), tf.cos(x)), constant([1.0, 2.0]))
        assert check_gradient(lambda x: [tf.sin(x), tf.cos(x)], constant([1.0, 2.0])).passed


class TestReport:
    @pytest.fixture
    def found(self):
        off = constant([1.0, 1.5, 1.01])
        f = sgtrick.with_gradient(density, lambda x: density_gradient(x) * off)
        return report(f, constant([0.5, 2.0, -1.0]))

    def test_sorted_by_error(self, found):
        assert [entry.name for entry in found.entries] == ["x[1]", "x[2]", "x[0]"]
        assert [entry.verdict for entry in found.entries] == ["wrong", "wrong", "ok"]

    def test_table_is_aligned(self, found):
        summary, header, *rows = str(found).splitlines()
        assert summary == f"3 entries: 2 wrong, 1 ok. {found.evaluations} evaluations."
        assert header.split()[:3] == ["entry", "embedded", "numerical"]
        assert len(rows) == 3
        verdict = header.index("verdict")
        assert [row[verdict:] for row in rows] == ["wrong", "wrong", "ok"]
        for column in ("embedded", "numerical", "abs. error", "rel. error"):
            end = header.index(column) + len(column)
            assert all(row[end - 1] != " " and row[end] == " " for row in rows)

    def test_a_long_table_is_cut(self):
        text = str(check_gradient(lambda x: tf.reduce_sum(x**2), constant(np.ones(30))))
        assert "... and 10 more with smaller errors" in text

    def test_errors(self, found):
        error = sgtrick.GradientCheckError(found)
        assert error.report is found
        assert "most of all at x[1]: embedded" in str(error)
        assert str(found) in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)

    def test_numbers(self, found):
        worst = found.worst
        assert worst.absolute == pytest.approx(abs(worst.embedded - worst.numerical))
        assert worst.relative == pytest.approx(1 / 3, rel=1e-6)
        assert worst.embedded == pytest.approx(1.5 * worst.numerical)

    def test_plot(self, found, tmp_path):
        ax = found.plot()
        line = ax.lines[0]
        np.testing.assert_array_equal(line.get_xdata(), found.worst.steps)
        expected = np.abs(found.worst.differences - found.worst.embedded)
        np.testing.assert_allclose(line.get_ydata(), expected)
        assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
        assert "x[1]: wrong" in ax.get_title()
        ax.figure.savefig(tmp_path / "plot.png")
        assert "x[0]: ok" in found.plot("x[0]", ax=ax).get_title()
        with pytest.raises(KeyError, match=r"entry must be .*, got 'x\[9\]'"):
            found.plot("x[9]")
        matplotlib.pyplot.close("all")

    def test_plot_without_matplotlib(self, found, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
        with pytest.raises(ImportError, match="pip install matplotlib"):
            found.plot()


class TestRates:
    def test_small_run(self):
        rates = load_rates()
        kinds = ["values of 1e-12 to 1e12", "entries of 1e-4 to 1e4", "noise of 1e-9 to 1e-5"]
        counts = rates.rates(1, kinds, ["full"])
        for (kind, _, right), counter in counts.items():
            assert not counter["wrong" if right else "passed"], kind
        assert {kind for kind, *_ in counts} == set(kinds)

    def test_the_docs_table_is_of_200_functions(self):
        text = (ROOT / "docs" / "check_gradient_rates.inc").read_text()
        assert int(re.match(r"(\d+) random functions", text)[1]) >= 200
        alarm, missed = map(
            float, re.search(r"\| all \| ([\d.]+)&nbsp;/&nbsp;([\d.]+) \|", text).groups()
        )
        assert alarm == 0
        assert missed < 1
        undecided = re.search(r"`cannot tell` for ([\d.]+) % .* and ([\d.]+) % of the wrong", text)
        assert max(map(float, undecided.groups())) < 9
