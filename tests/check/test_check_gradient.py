"""`check_gradient` finds wrong gradients, and passes right ones."""

import re

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from checked_functions import MODES, density, density_gradient, report
from matrix import spread
from sgtrick import check_gradient
from shared import constant


def named_arguments(data, n, scale):
    return {"a": data["u"] * scale**n, "b": [tf.reduce_sum(data["v"][0]), n]}


RIGHT = {
    "tf.function": (tf.function(density), constant([0.5, 2.0, -1.0])),
    "XLA": (tf.function(density, jit_compile=True), constant([0.5, 2.0, -1.0])),
    "matrix": (tf.linalg.inv, constant([[2.0, 0.3], [0.1, 1.0]])),
    "from_numpy": (
        sgtrick.from_numpy(lambda x: (np.sum(x**3), 3 * x**2)),
        constant([[0.5, 2.0], [1.0, -1.0]]),
    ),
    "value and gradient, arguments": (
        sgtrick.from_value_and_gradient(lambda a, b: (a * b, (b, a)), argnums=(0, 1)),
        (constant(3.0), constant(4.0)),
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


def scaled(scale):
    return (
        lambda x: scale * density(x),
        lambda x: scale * density_gradient(x),
        constant([0.5, 2.0, -1.0]),
    )


HARD = {
    "values of 1e-12": scaled(1e-12),
    "values of 1e12": scaled(1e12),
    "arguments of 1e-12 to 1e6": (
        lambda x: tf.reduce_sum(tf.math.log(x) ** 2),
        lambda x: 2 * tf.math.log(x) / x,
        constant(np.array([1e-12, 1.0, 1e6]) * [1.5, 2.0, 3.0]),
    ),
    "noise": (
        lambda x: density(x) + 1e-6 * tf.stop_gradient(tf.sin(1e15 * tf.reduce_sum(x))),
        density_gradient,
        constant([0.5, 2.0, -1.0]),
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
        found = check_gradient(lambda x: {"b": tf.linalg.matvec(a, x[0])}, [constant([0.5, 2.0])])
        entries = {entry.name: [entry.embedded, entry.numerical] for entry in found.entries}
        expected = {f"y['b'][{i}] by x[0][{j}]": [a[i, j]] * 2 for i, j in np.ndindex(3, 2)}
        assert entries == {name: pytest.approx(pair, rel=1e-9) for name, pair in expected.items()}

    def test_a_plain_tuple_is_several_arguments_and_a_list_one(self):
        assert check_gradient(lambda a, b: a * b, (2.0, 3.0)).passed
        assert check_gradient(lambda ab: ab[0] * ab[1], [2.0, 3.0]).passed
        assert check_gradient(lambda a: a[0] * a[1], ((2.0, 3.0),)).passed

    @pytest.mark.long
    @pytest.mark.parametrize(("case", "mode"), spread(HARD, ["full", "random"], together=1))
    def test_is_told_from_one_that_is_1_percent_off(self, case, mode):
        f, gradient, x = HARD[case]
        assert check_gradient(tf.function(f), x, mode=mode).passed
        wrong = tf.function(sgtrick.with_gradient(f, lambda x: 1.01 * gradient(x)))
        assert report(wrong, x, mode=mode).worst.verdict == "wrong"

    def test_rounded_values(self):  # of a solver that prints six digits
        f = sgtrick.with_gradient(
            lambda x: tf.reduce_sum(tf.round(1e6 * tf.sin(x)) / 1e6), lambda x: tf.cos(x)
        )
        assert check_gradient(f, constant([0.5, 2.0])).passed

    def test_narrow_function(self):  # over large steps it is as good as constant
        x = constant([1e-5, -2e-5])
        assert check_gradient(lambda x: tf.exp(-tf.reduce_sum((1e5 * x) ** 2)), x).passed

    def test_tolerances(self):
        f = sgtrick.with_gradient(lambda x: tf.sin(x), lambda x: 1.0001 * tf.cos(x))
        x = constant(0.7)
        assert report(f, x).worst.verdict == "wrong"
        assert check_gradient(f, x, rtol=1e-3).passed
        assert check_gradient(f, x, atol=1e-3).passed
        assert report(f, x, rtol=1e-5, atol=1e-6).worst.verdict == "wrong"


SPOILED = {
    "1 % off": lambda x: 1.01 * density_gradient(x),
    "one entry": lambda x: density_gradient(x) * constant([1.0, 1.0, 1.01]),
    "mean over the batch": lambda x: density_gradient(x) / 2,
    "another member's": lambda x: density_gradient(x)[::-1],
    "not a number": lambda x: density_gradient(x) * np.nan,
}


class TestWrong:
    @pytest.mark.parametrize(("how", "mode"), spread(SPOILED, ["full", "random"], together=1))
    def test_is_found(self, how, mode):
        x = constant([[0.5, 2.0, -1.0], [0.3, 0.1, 0.7]])
        f = tf.function(sgtrick.with_gradient(density, SPOILED[how]))
        verdict = "refused" if how == "not a number" else "wrong"
        message = f"The gradient is {verdict}"
        with pytest.raises(sgtrick.GradientCheckError, match=message) as caught:
            check_gradient(f, x, mode=mode)
        assert caught.value.report.worst.verdict == verdict

    @pytest.mark.parametrize(
        ("dtype", "size", "verdicts"),
        [
            ("float64", 1e-300, {"wrong"}),
            ("float32", 1e-30, {"wrong"}),
            ("float16", 1e-4, {"wrong"}),
            ("float16", 1e-6, {"wrong", "cannot tell"}),  # of which it holds one digit
        ],
    )
    def test_of_a_tiny_function_is_found(self, dtype, size, verdicts):
        f = sgtrick.with_gradient(
            lambda x: tf.constant(size, dtype) * tf.reduce_sum(x),
            lambda x: tf.constant(2 * size, dtype) * tf.ones_like(x),
        )
        assert report(f, tf.constant([1.0, 2.0], dtype)).worst.verdict in verdicts

    @MODES
    def test_transposed_jacobian(self, mode):
        a = np.random.default_rng(0).normal(size=(3, 3))
        f = sgtrick.with_gradient(lambda x: tf.linalg.matvec(a, x), lambda x: constant(a.T))
        assert report(f, constant([0.5, 2.0, -1.0]), mode=mode).worst.verdict == "wrong"

    def test_one_entry_in_a_thousand_is_in_every_random_direction(self):
        f = tf.function(wrong_in({617: 1e-2}))
        found = report(f, constant(np.ones(1000)), mode="random")
        assert found.count("wrong") == len(found.entries) == 10

    def test_two_entries_hardly_cancel_in_any_random_direction(self):
        f, x = tf.function(wrong_in({1: 0.1, 617: 0.1})), constant(np.ones(1000))
        assert report(f, x, mode="random").count("wrong") >= 9

    @pytest.mark.parametrize("sizes", [(1e8, 1.0), (1e-7, 1e3)])
    def test_an_output_is_not_hidden_by_a_larger_one(self, sizes):
        def f(x):
            return constant(sizes) * tf.stack([tf.reduce_sum(x**2), tf.sin(x[0])])

        def jacobian(x):  # the smaller output is off by a tenth
            off = [1.0, 1.1] if sizes[0] > sizes[1] else [1.1, 1.0]
            rows = tf.stack([2 * x, tf.stack([tf.cos(x[0]), 0.0])])
            return (constant(sizes) * off)[:, None] * rows

        h = tf.function(sgtrick.with_gradient(f, jacobian))
        for seed in range(2):
            found = report(h, constant([0.5, 2.0]), mode="random", seed=seed)
            assert found.worst.verdict == "wrong"


FORGETFUL = {  # what a rule does to its upstream gradient, or tangent
    "forgotten": tf.ones_like,
    "squared": tf.square,
    "absolute": tf.abs,
    "clipped": lambda u: tf.clip_by_value(u, -1.0, 1.0),
    "only positive": tf.nn.relu,
    "at most 5": lambda u: tf.minimum(u, 5.0),
    "saturated": tf.tanh,
    "of the third power": lambda u: u**3,
    "rounded": tf.sign,
}


def stock(spoil):
    @tf.custom_gradient
    def f(x):
        return tf.sin(x), lambda u: spoil(u) * tf.cos(x)

    return f


RULES = {
    "tf.custom_gradient": stock,
    "custom_vjp": lambda spoil: sgtrick.custom_vjp(
        lambda x: (tf.sin(x), lambda u: spoil(u) * tf.cos(x))
    ),
    "engine": lambda spoil: sgtrick.from_numpy(
        np.sin, vjp=lambda x, u: np.asarray(spoil(tf.constant(u))) * np.cos(x), value_shape=(2,)
    ),
}


class TestRulesThatAreNotLinear:
    """They are right for an upstream gradient of 1."""

    @pytest.mark.parametrize(("rule", "how"), spread(RULES, FORGETFUL, together=1))
    def test_is_found(self, rule, how):
        h = RULES[rule](FORGETFUL[how])
        with pytest.raises(sgtrick.GradientCheckError, match="128 and -64 times") as caught:
            check_gradient(h, constant([0.5, 2.0]))
        worst = caught.value.report.worst
        assert (worst.verdict, worst.remark) == ("wrong", "not linear")

    @MODES
    @pytest.mark.parametrize("how", ["forgotten", "at most 5"])
    def test_of_one_number(self, how, mode):
        spoil = FORGETFUL[how]
        h = sgtrick.custom_vjp(lambda x: (tf.reduce_sum(x**2), lambda u: spoil(u) * 2 * x))
        assert report(tf.function(h), constant([0.5, 2.0]), mode=mode).worst.verdict == "wrong"

    @pytest.mark.parametrize("how", ["squared", "absolute", "of the third power", "saturated"])
    def test_of_tangents(self, how):
        h = sgtrick.custom_vjp(lambda x: (tf.sin(x), lambda u: u * tf.cos(x)))
        h.defjvp(lambda p, t: (h(*p), FORGETFUL[how](t[0]) * tf.cos(p[0])))
        found = report(h, constant([0.5, 2.0]))
        wrong = {e.name for e in found.entries if e.verdict == "wrong"}
        assert wrong == {f"y[{i}] by x[{i}], forward mode" for i in range(2)}

    def test_what_overflows_at_128_is_asked_for_at_1(self):
        assert check_gradient(lambda x: 6e2 * x, tf.constant([0.5, 2.0], tf.float16)).passed
        assert check_gradient(lambda x: 1e37 * x, tf.constant([0.5, 2.0])).passed


class TestJvpRules:
    @pytest.mark.long
    @pytest.mark.parametrize(("n", "mode"), [(2, "full"), (2, "random"), (3, "random")])
    def test_a_transposed_matrix_is_always_found(self, n, mode):
        a = np.random.default_rng(n).normal(size=(n, n))
        h = sgtrick.custom_vjp(
            lambda x: (tf.linalg.matvec(a, x), lambda u: tf.linalg.matvec(a.T, u))
        )
        h.defjvp(lambda p, t: (h(*p), tf.linalg.matvec(a.T, t[0])))
        for seed in range(4):
            found = report(h, constant(np.ones(n)), mode=mode, seed=seed)
            wrong = [e.name for e in found.entries if e.verdict == "wrong"]
            assert wrong
            assert all(name.endswith("forward mode") for name in wrong)


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

    @pytest.mark.parametrize("pack", [tuple, list])
    def test_native(self, pack):
        f = {
            tuple: lambda a, b: tf.reduce_sum(a * b**2),
            list: lambda x: tf.reduce_sum(x[0] * x[1] ** 2),
        }[pack]
        assert check_gradient(f, pack([self.X, self.X]), order=2).passed

    @pytest.mark.parametrize("x", [X, tf.cast(X, tf.float32)], ids=["float64", "float32"])
    def test_wrong_gradients_of_the_right_sum(self, x):
        @sgtrick.custom_vjp
        def f(a, b):
            return tf.reduce_sum(a * b), lambda u: (u * b, None)

        assert report(f, (x, x)).worst.verdict == "wrong"

    def test_that_the_function_reads_too(self):
        """The differences do not move what is not an argument, so neither may the tape."""
        assert check_gradient(lambda x: tf.reduce_sum(x * self.X), self.X).passed


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
            assert found.worst.name == "x[1]"
            assert found.count("wrong") == 1

    def test_is_right_where_the_derivative_is_zero(self):
        found = check_gradient(lambda a, b: a + 0.0, (constant(1.0), constant(3.0)))
        assert any("No gradient with respect to x[1]" in note for note in found.notes)

    @MODES
    def test_constant_function(self, mode):
        assert check_gradient(lambda x: constant(7.0), constant([1.0, 2.0]), mode=mode).passed


class TestOrder2:
    @pytest.mark.long
    def test_native(self):
        x = constant([0.5, 2.0, -1.0])
        found = check_gradient(lambda x: tf.sin(x) * tf.reduce_sum(x), x, order=2)
        assert {entry.order for entry in found.entries} == {1, 2}
        assert len({entry.name for entry in found.entries}) == len(found.entries)

    def test_twice_the_second_derivative(self):  # the formula naively un-stopped
        def h(x):
            s = tf.stop_gradient(x)
            return tf.sin(s) + tf.cos(x) * (x - s)

        found = report(h, constant(0.5), order=2)
        assert (found.worst.order, found.worst.verdict) == (2, "wrong")
        assert found.worst.embedded == pytest.approx(2 * found.worst.numerical)
        assert "The second derivative is twice the numerical one." in str(found)
