"""`check_gradient(order=2)` on everything that can have second derivatives: right, wrong, refused."""

import re

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import spread
from sgtrick import check_gradient
from shared import constant

X = constant([0.5, 2.0])


def value(x):
    return x[0] ** 3 * x[1] + x[1] ** 2


def gradient(x):
    return 3 * x[0] ** 2 * x[1], x[0] ** 3 + 2 * x[1]


def hessian(x):
    return [[6 * x[0] * x[1], 3 * x[0] ** 2], [3 * x[0] ** 2, 2.0]]


def embedded(x, hx=None):
    return sgtrick.custom_gradient(value(x), tf.stack(gradient(x)), x, hx=hx)


def engine(**options):
    return sgtrick.from_numpy(lambda x: (value(x), np.stack(gradient(x))), **options)


RIGHT = {
    "hx in a sum, in a tf.function": (
        tf.function(lambda x: tf.reduce_sum(tf.sin(x)) + embedded(x, tf.stack(hessian(x)))),
        X,
    ),
    "from_numpy, hessp": (engine(hessp=lambda x, v: np.array(hessian(x)) @ v), X),
    "from_numpy, hessp, of a batch": (
        engine(hessp=lambda x, v: np.array(hessian(x)) @ v),
        constant([[0.5, 2.0], [1.0, -1.0]]),
    ),
    "custom_vjp": (sgtrick.custom_vjp(lambda x: (tf.exp(x), lambda u: u * tf.exp(x))), X),
}

ENGINE = engine()
HOST = "sees no connection from the gradient to the point"
UNTRACEABLE = "tf.function cannot trace the gradient function"
REFUSED = {
    "custom_gradient": (embedded, X, "Pass the Hessian"),
    "custom_gradient in XLA": (tf.function(embedded, jit_compile=True), X, "Pass the Hessian"),
    "from_numpy": (engine(), X, "Pass hessp="),
    "from_numpy in a tf.function": (tf.function(lambda x: ENGINE(x) ** 2), X, "Pass hessp="),
    "float32": (engine(), tf.constant([0.5, 2.0]), "Pass hessp="),
    "with_gradient of the host": (
        sgtrick.with_gradient(lambda x: tf.sin(x), lambda x: tf.constant(np.cos(x.numpy()))),
        X,
        UNTRACEABLE,
    ),
    "custom_vjp of the host": (
        sgtrick.custom_vjp(
            lambda x: (tf.sin(x), lambda u: u * tf.numpy_function(np.cos, [x], tf.float64))
        ),
        X,
        HOST,
    ),
}


class TestRight:
    @pytest.mark.long
    @pytest.mark.parametrize(("case", "mode"), spread(RIGHT, ["full", "random"], together=1))
    def test_passes(self, case, mode):
        found = check_gradient(*RIGHT[case], order=2, mode=mode)
        assert {(entry.order, entry.verdict) for entry in found.entries} == {(1, "ok"), (2, "ok")}

    def test_entries_are_those_of_the_hessian(self):
        found = check_gradient(*RIGHT["from_numpy, hessp"], order=2)
        second = {e.name: (e.embedded, e.numerical) for e in found.entries if e.order == 2}
        expected = {
            f"x[{i}] by x[{j}]": pytest.approx([hessian(X.numpy())[i][j]] * 2)
            for i, j in np.ndindex(2, 2)
        }
        assert {name: list(pair) for name, pair in second.items()} == expected


class TestWrong:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("by", "scale", "mode"),
        [("hx", 0.0, "full"), ("hx callable", 1.02, "random"), ("hessp", 1.02, "full")],
    )
    def test_is_found(self, by, scale, mode):
        f = {
            "hx": lambda x: embedded(x, scale * tf.stack(hessian(x))),
            "hx callable": lambda x: embedded(
                x, lambda v: scale * tf.linalg.matvec(tf.stack(hessian(x)), v)
            ),
            "hessp": engine(hessp=lambda x, v: scale * np.array(hessian(x)) @ v),
        }[by]
        with pytest.raises(sgtrick.GradientCheckError, match="The second derivative is wrong") as e:
            check_gradient(f, X, order=2, mode=mode)
        found = e.value.report
        assert (found.worst.order, found.worst.verdict) == (2, "wrong")
        assert {entry.verdict for entry in found.entries if entry.order == 1} == {"ok"}

    @pytest.mark.long
    @pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e8, 1.0), (1.0, -1.0)])
    def test_of_several_outputs_in_random_directions(self, sizes):
        """One that outputs share may cancel, and that of a small output is small."""
        shared = abs(sizes[0]) == abs(sizes[1])

        def slope(off):
            return sgtrick.with_gradient(
                lambda x: tf.stack(gradient(x)),
                lambda x: tf.stack(hessian(x)) + off * tf.eye(2, dtype=x.dtype),
            )

        slopes = slope(0.1 * shared), slope(0.1)

        @sgtrick.custom_vjp
        def f(x):
            def pull(u):
                return tf.add_n([u[i] * s * slopes[i](x) for i, s in enumerate(sizes)])

            return value(x) * constant(sizes), pull

        f = tf.function(f)
        for seed in range(2):
            found = check_gradient(f, X, order=2, mode="random", seed=seed, raise_exception=False)
            assert {e.verdict for e in found.entries if e.order == 1} == {"ok"}
            assert found.worst.verdict == "wrong"

    @pytest.mark.parametrize("how", ["u forgotten", "u squared", "v absolute"])
    def test_a_product_that_is_not_linear(self, how):
        def hessp(x, u, v):
            u = {"u forgotten": np.ones_like(u), "u squared": u**2}.get(how, u)
            return -u * np.sin(x) * (np.abs(v) if how == "v absolute" else v)

        f = sgtrick.from_numpy(
            np.sin, vjp=lambda x, u: u * np.cos(x), hessp=hessp, value_shape=(2,)
        )
        found = check_gradient(f, X, order=2, raise_exception=False)
        assert (found.worst.order, found.worst.verdict) == (2, "wrong")
        assert {e.verdict for e in found.entries if e.order == 1} == {"ok"}

    @pytest.mark.parametrize("by", ["hx callable", "hessp"])
    def test_asymmetric(self, by):
        lower = np.tril(hessian(X.numpy()))
        f = {
            "hx callable": lambda x: embedded(x, lambda v: tf.linalg.matvec(lower, v)),
            "hessp": engine(hessp=lambda x, v: lower @ v),
        }[by]
        found = check_gradient(f, X, order=2, raise_exception=False)
        wrong = {entry.name for entry in found.entries if entry.verdict == "wrong"}
        assert len(wrong) == 1
        assert wrong < {"x[0] by x[1]", "x[1] by x[0]"}

    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
    def test_of_a_wrong_shape_raises(self, wrap):
        f = wrap(engine(hessp=lambda x, v: np.zeros(3)))
        with pytest.raises(ValueError, match=r"must have the shape \[2\], got \[3\]"):
            check_gradient(f, X, order=2)


class TestRefused:
    @pytest.mark.long
    @pytest.mark.parametrize(("case", "mode"), spread(REFUSED, ["full", "random"], together=1))
    def test_is_a_verdict_with_the_forms_own_message(self, case, mode):
        f, x, message = REFUSED[case]
        with pytest.raises(sgtrick.GradientCheckError, match="second derivative is refused") as e:
            check_gradient(f, x, order=2, mode=mode)
        assert message in str(e.value).partition("\n")[0]
        found = e.value.report
        assert {entry.verdict for entry in found.entries if entry.order == 1} == {"ok"}
        second = [entry for entry in found.entries if entry.order == 2]
        assert {entry.verdict for entry in second} == {"refused"}
        assert all(np.isnan(entry.embedded) and message in entry.remark for entry in second)
        assert not found.passed
        assert str(found).count(message) == 1  # not in each row
        assert "node" not in found.worst.remark  # nor what TensorFlow calls its operations

    def test_what_it_would_be_is_shown(self):
        found = check_gradient(engine(), X, order=2, raise_exception=False)
        numerical = [
            next(e.numerical for e in found.entries if e.name == f"x[{i}] by x[{j}]")
            for i, j in np.ndindex(2, 2)
        ]
        np.testing.assert_allclose(numerical, np.ravel(hessian(X.numpy())), rtol=1e-8)
        row = next(line for line in str(found).splitlines() if "x[0] by x[0]" in line)
        assert re.fullmatch(r"x\[0\] by x\[0\] +nan +6 +\S+ +nan +nan +refused", row)

    def test_the_rest_is_still_checked(self):
        known = sgtrick.with_gradient(lambda a: a**2, lambda a: 2 * a)
        of_host = engine()
        found = check_gradient(
            lambda a, x: known(a) * x[0] + of_host(x),
            (constant(3.0), X),
            order=2,
            raise_exception=False,
        )
        refused = {e.name for e in found.entries if e.verdict == "refused"}
        assert refused == {f"x[1][{i}] by x[1][{j}]" for i, j in np.ndindex(2, 2)}
        assert {e.verdict for e in found.entries if e.name not in refused} == {"ok"}

    def test_of_first_order(self):
        def slope(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = embedded(2 * x)
            return tape.gradient(y, x)

        found = check_gradient(slope, X, order=2, raise_exception=False)
        assert {(entry.order, entry.verdict) for entry in found.entries} == {(1, "refused")}
        assert any("second derivatives were not checked" in note for note in found.notes)

    def test_nan_that_nobody_explains(self):
        def trap(x):  # where() keeps log(0) out of the value, and not out of the gradient
            return 2 * x + tf.where(x > 5, tf.math.log(x - 1), 0)

        f = sgtrick.with_gradient(lambda x: x**2, trap)
        found = check_gradient(f, constant(1.0), order=2, max_step=0.1, raise_exception=False)
        assert (found.worst.order, found.worst.verdict) == (2, "refused")
        assert np.isnan(found.worst.embedded)
        assert "no function refused it: a rule returned NaN" in str(found)

    def test_what_runs_in_a_graph_alone(self):
        @tf.function
        def slope(x):
            return tf.gradients(embedded(x), x)[0]

        found = check_gradient(slope, X, raise_exception=False)
        assert not found.passed
        assert not np.isfinite(found.worst.embedded)

    @pytest.mark.parametrize("is_asserted", [False, True])
    def test_a_gradient_that_is_nan_of_what_runs_in_a_graph_alone(self, is_asserted):
        @tf.function(autograph=False)
        def slope(x):
            assert not (is_asserted and tf.executing_eagerly())
            square = tf.gradients(x**2, x)[0] if not is_asserted else 2 * x
            return square + tf.sqrt(x - x)

        found = check_gradient(slope, X, raise_exception=False)
        assert {e.verdict for e in found.entries} == {"ok", "refused"}
        assert "a rule returned NaN, or autodiff computed it" in str(found)

    def test_functions_are_graphs_again_afterwards(self):
        check_gradient(tf.function(engine()), X, order=2, raise_exception=False)
        assert not tf.config.functions_run_eagerly()

    def test_mistakes_in_a_rule_are_no_refusals(self):
        def rule(u):
            @tf.custom_gradient
            def inner(u):
                def again(_):
                    raise KeyError("mistake")

                return u, again

            return inner(u * X)

        with pytest.raises(KeyError, match="mistake"):
            check_gradient(
                sgtrick.custom_vjp(lambda x: (tf.reduce_sum(x**2) / 2, rule)), X, order=2
            )
