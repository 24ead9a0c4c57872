"""Rules for one mode that are transposed for the other: right if they are linear, else unknown."""

import functools
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
import shared
from matrix import LOUD, spread, traced, verdict
from shared import FORWARD, TWICE, WAYS, Way, derivative, gradient, looped, on_host, pushed

X = np.array([[0.9, -0.4, 2.1], [0.3, 1.7, -1.2]])
ALONG = np.array([[0.7, -1.1, 0.4], [-0.3, 0.8, 1.9]])  # tangents, or upstream gradients
ONE_HOT = np.eye(X.size).reshape(-1, *X.shape)


def _largest_alone(u, x):
    return tf.where(tf.abs(u) >= tf.reduce_max(tf.abs(u), -1, keepdims=True), u, 0 * x)


CLIPPING = {
    "clipped": lambda u, x: tf.clip_by_value(u, -0.5, 0.5) * x,
    "clipped far out": lambda u, x: tf.clip_by_value(u, -50, 50) * x,
    "sign": lambda u, x: tf.sign(u) * x,
    "constant added": lambda u, x: u + 0.5 * x,
}
# For these, `J(u) u = g(u)`.
HOMOGENEOUS_BY_ENTRY = {
    "relu": lambda u, x: tf.nn.relu(u) * x,
    "abs": lambda u, x: tf.abs(u) * x,
}
HOMOGENEOUS = {
    "guided relu": lambda u, x: u * tf.cast(u > 0, u.dtype) * tf.cast(x > 0, u.dtype),
    "square by size": lambda u, x: u**2 / tf.norm(u, axis=-1, keepdims=True) + 0 * x,
    "sorted": lambda u, x: tf.sort(u, -1) * x,
    "largest": lambda u, x: tf.reduce_max(u, -1, keepdims=True) * x,
    "largest alone": _largest_alone,
    "norm": lambda u, x: tf.norm(u, axis=-1, keepdims=True) * x,
}
BY_ENTRY = CLIPPING | HOMOGENEOUS_BY_ENTRY


def _padded(u, x):
    columns = u[..., tf.newaxis] * tf.ones_like(u)[..., tf.newaxis, :]
    padding = tf.constant(5.0, u.dtype)
    return tf.reduce_sum(tf.linalg.diag_part(columns, k=(0, 1), padding_value=padding), -2) * x


NOT_LINEAR = (
    BY_ENTRY
    | HOMOGENEOUS
    | {"clipped by norm": lambda u, x: tf.clip_by_norm(u, 1.0) * x, "padded": _padded}
)


def with_vjp(rule):
    return sgtrick.custom_vjp(lambda x: (2 * x, lambda u: rule(u, x)))


def with_jvp(rule):
    return shared.with_jvp(lambda xs, ts: (2 * xs[0], rule(ts[0], xs[0])), lambda x: 2 * x)


def forward(f):
    return functools.partial(pushed, f)


def reverse(f):
    return functools.partial(gradient, f)


# A form, and the mode in which it is transposed.
TRANSPOSED = {"custom_vjp": (with_vjp, forward), "custom_jvp": (with_jvp, reverse)}


WAYS = WAYS | {
    "in tf.while_loop": Way(inside=looped, around=traced),
    "around tf.while_loop": Way(inside=lambda f: traced(looped(f))),
}


FORM = pytest.mark.parametrize("form", TRANSPOSED)


def is_loud(run, *args):
    """Whether this raises, or nothing in the result is finite."""
    return verdict(lambda: run(*args), np.nan) in LOUD


@pytest.mark.long
class TestRulesThatAreNotLinear:
    @pytest.mark.parametrize(
        ("form", "way", "rule"),
        spread(
            TRANSPOSED,
            WAYS,
            NOT_LINEAR,
            valid=lambda form, way, rule: way == "eager" or rule == "abs",
        ),
    )
    def test_are_loud(self, form, way, rule):
        make, mode = TRANSPOSED[form]
        run = WAYS[way](make(NOT_LINEAR[rule]), mode)
        assert is_loud(run, tf.constant(X), tf.constant(ALONG))

    @pytest.mark.parametrize(
        ("form", "way", "rule", "dtype"),
        spread(TRANSPOSED, ["eager", "around tf.function"], BY_ENTRY, ["float16", "float64"]),
    )
    def test_in_any_one_entry(self, form, way, rule, dtype):
        make, mode = TRANSPOSED[form]
        run = WAYS[way](make(BY_ENTRY[rule]), mode)
        assert all(is_loud(run, tf.cast(X, dtype), tf.cast(along, dtype)) for along in ONE_HOT)

    @pytest.mark.parametrize(
        ("form", "way", "rule", "shape"),
        spread(
            TRANSPOSED,
            ["eager", "in tf.function", "around tf.function"],
            ["clipped", "relu", "abs", "sign"],
            [(), (2,), (5, 4), (40, 30), (None,)],
        ),
    )
    def test_of_any_shape(self, form, way, rule, shape):
        make, mode = TRANSPOSED[form]
        f = make(BY_ENTRY[rule])
        unknown = shape == (None,)

        def hidden(x):
            return f(tf.boolean_mask(x, x > 0))

        x = along = tf.ones([7] if unknown else shape, tf.float64)
        assert is_loud(WAYS[way](hidden if unknown else f, mode), x, along)

    @FORM
    def test_of_complex_numbers(self, form):
        make, mode = TRANSPOSED[form]
        x, along = tf.constant([1.0 + 2j, 3j]), tf.constant([1.0 - 1j, 2 + 1j])
        f = make(lambda u, x: tf.complex(tf.abs(tf.math.real(u)), tf.math.imag(u)) * x)
        assert is_loud(mode(f), x, along)
        linear = mode(make(lambda u, x: tf.complex(2 * tf.math.real(u), tf.math.imag(u))))
        np.testing.assert_allclose(linear(x, along), [2.0 - 1j, 4 + 1j], rtol=1e-12)

    @pytest.mark.parametrize("way", ["eager", "in tf.function", "around tf.function"])
    def test_of_several_together(self, way):
        """Outputs or arguments, of which each alone is linear."""
        two = sgtrick.custom_vjp(lambda x: ((2 * x, 3 * x), tf.maximum))
        form = shared.with_jvp(lambda xs, ts: (sum(xs), tf.maximum(*ts)), lambda x, y: x + y)
        for run in (
            WAYS[way](lambda x: tf.add_n(two(x)), forward),
            WAYS[way](lambda x: form(x, 2 * x), reverse),
        ):
            assert is_loud(run, tf.constant(X), tf.constant(ALONG))

    @pytest.mark.parametrize(
        ("run", "message"),
        [
            (forward(with_vjp(NOT_LINEAR["relu"])), "Forward mode transposes the gradient function.*is not linear"),
            (reverse(with_jvp(NOT_LINEAR["abs"])), "Reverse mode transposes the JVP rule.*is not linear"),
        ],
        ids=["forward", "reverse"],
    )  # fmt: skip
    def test_the_errors(self, run, message):
        for wrapped in (run, tf.function(run)):
            with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match=message):
                wrapped(tf.constant(X), tf.constant(ALONG))

    @pytest.mark.parametrize(
        ("way", "rule"),
        spread([w for w in WAYS if "loop" not in w], ["relu", "clipped", "norm"], together=1),
    )
    def test_keep_their_own_mode(self, way, rule):
        rule, x, along = NOT_LINEAR[rule], tf.constant(X), tf.constant(ALONG)
        expected = rule(along, x)
        if "vectorized_map" in way:
            expected = tf.stack([rule(u, a) for u, a in zip(along, x, strict=True)])
        np.testing.assert_allclose(WAYS[way](with_vjp(rule), reverse)(x, along), expected)
        run = WAYS[way](with_jvp(rule), forward)
        if "around" in way:  # TensorFlow transposes functions
            assert is_loud(run, x, along)
        else:
            np.testing.assert_allclose(run(x, along), expected)

    @pytest.mark.parametrize(
        ("rule", "way"),
        spread(
            ["clipped", "relu", "largest", "norm"],
            [Way(), Way(inside=traced), Way(between=traced), Way(around=traced)],
            together=1,
        ),
    )
    def test_have_second_derivatives(self, rule, way):
        """Which transpose nothing."""
        rule, x = NOT_LINEAR[rule], tf.constant(X)
        one = tf.ones_like(x)
        np.testing.assert_allclose(
            way(with_vjp(lambda u, x: rule(u, x**2)), *TWICE)(x), rule(one, 2 * x), rtol=1e-12
        )


def _matrices():
    """Factors of which the last have condition numbers of 1e5 and 1e3."""
    rng = np.random.default_rng(0)
    full = rng.normal(size=[3, 3])
    factor = np.tril(rng.normal(size=[3, 3]), -1)
    return full, factor + np.diag([1.0, 1e-5, 1.0]), factor + np.diag([1.0, 1e-3, 1.0])


FULL, ILL, BAD = _matrices()


def _solve(u, a):
    a = tf.cast(a, u.dtype)
    return tf.linalg.triangular_solve(a, u[..., tf.newaxis])[..., 0]


# Linear functions of an upstream gradient or tangent with their matrices.
LINEAR = {
    "a matrix": (lambda u: tf.linalg.matvec(tf.cast(FULL, u.dtype), u), FULL),
    "summed up": (lambda u: tf.cumsum(u, -1), np.tril(np.ones([3, 3]))),
    "large": (lambda u: 1e3 * u, 1e3 * np.eye(3)),
    "small": (lambda u: 1e-3 * u, 1e-3 * np.eye(3)),
    "cancelling": (lambda u: u - tf.reduce_mean(u, -1, keepdims=True), np.eye(3) - 1 / 3),
}
# The same, with the least dtype that has enough digits.
SOLVED = {
    "ill-conditioned": ("float64", lambda u: _solve(u, ILL), np.linalg.inv(ILL)),
    "badly conditioned": ("float32", lambda u: _solve(u, BAD), np.linalg.inv(BAD)),
}


class TestLinearRules:
    @pytest.mark.parametrize(
        ("form", "way", "rule"),
        spread(
            TRANSPOSED,
            WAYS,
            LINEAR,
            valid=lambda form, way, rule: way == "eager" or rule == "a matrix",
        ),
    )
    def test_are_right(self, form, way, rule):
        (make, mode), (rule, matrix) = TRANSPOSED[form], LINEAR[rule]
        f = make(lambda u, x: rule(u) * tf.ones_like(x))
        came = WAYS[way](f, mode)(tf.constant(X), tf.constant(ALONG))
        np.testing.assert_allclose(came, ALONG @ matrix, rtol=1e-11, atol=1e-14)

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("form", "way", "dtype", "rule", "batch"),
        spread(
            TRANSPOSED,
            ["eager", "around tf.function"],
            ["float16", "bfloat16", "float32", "float64"],
            LINEAR | SOLVED,
            [(), (500,)],
            valid=lambda form, way, dtype, rule, batch: SOLVED.get(rule, (dtype,))[0] == dtype,
        ),
    )
    def test_of_every_dtype(self, form, way, dtype, rule, batch):
        """Without false alarms."""
        (make, mode), (*_, rule, matrix) = TRANSPOSED[form], (LINEAR | SOLVED)[rule]
        along = np.random.default_rng(1).normal(size=[*batch, 3])
        f = make(lambda u, x: rule(u) * tf.ones_like(x))
        came = WAYS[way](f, mode)(tf.ones([*batch, 3], dtype), tf.cast(along, dtype))
        expected = along @ matrix
        digits = {"float16": 1e-2, "bfloat16": 1e-1, "float32": 1e-3, "float64": 1e-9}[dtype]
        atol = digits * np.max(np.abs(expected))
        np.testing.assert_allclose(tf.cast(came, "float64"), expected, atol=atol)


near = on_host(lambda u: np.asarray(0.9 * u, u.dtype))  # what TensorFlow cannot transpose


def _centred(u):
    return u - tf.reduce_mean(u)


_total = tf.function(lambda u: tf.reduce_sum(_centred(u)))


class TestResultsThatCancel:
    """To zero, up to rounding, as the gradient by a shift does in front of a normalisation."""

    # The gradient by the shift, beside that by the point.
    BY_SHIFT = {
        "sum": lambda u: tf.reduce_sum(_centred(u)),
        "function": _total,
        "difference": lambda u: tf.reduce_sum(u * 0.3) - 0.3 * tf.reduce_sum(u),
        "complex": lambda u: tf.math.real(tf.reduce_sum(tf.cast(_centred(u), tf.complex64))),
    }
    WAYS: ClassVar = {
        "Hessian around tf.function": Way(inside=traced, modes=TWICE),
        "forward around tf.function": Way(inside=traced, modes=FORWARD),
        "forward": Way(modes=FORWARD),
    }

    @pytest.mark.parametrize("by_shift", BY_SHIFT)
    @pytest.mark.parametrize("way", WAYS)
    def test_are_right(self, by_shift, way):
        def pull(u):
            return _centred(u), tf.cast(self.BY_SHIFT[by_shift](u), u.dtype)

        form = sgtrick.custom_vjp(lambda x, shift: (_centred(tf.stop_gradient(x)), pull))
        x = tf.constant(X.ravel(), tf.float32)
        shifted = lambda f: lambda x: f(x, tf.reduce_sum(x)) ** 3  # noqa: E731
        found = self.WAYS[way](shifted(form))(x)
        expected = self.WAYS[way](shifted(lambda x, shift: _centred(x + shift)))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    CALLED: ClassVar = {
        "operations": lambda u: tf.reduce_sum(_centred(u)),
        "a function": _total,
        "a function in a function": tf.function(lambda u: 2.0 * _total(u)),
        "one of two results": lambda u: tf.function(lambda u, x: (x, _total(u) / x))(u, 3.0)[1],
    }

    @pytest.mark.parametrize(
        ("called", "form", "way"),
        spread(CALLED, TRANSPOSED, ["eager", "in tf.function", "around tf.function"], together=1),
    )
    def test_alone(self, called, form, way):
        """In eager execution, where numbers are tested, and by what a trace tells."""
        make, mode = TRANSPOSED[form]
        f = make(lambda u, x: self.CALLED[called](u) * tf.ones_like(x))
        found = WAYS[way](f, mode)(tf.constant(X), tf.constant(ALONG))
        np.testing.assert_allclose(found, 0 * X, atol=1e-14)

    NOT_LINEAR: ClassVar = {
        "affine": lambda u: _total(u) + 1.0,
        "absolute": tf.abs,
        "square": lambda u: u * u,
        "another gradient": tf.custom_gradient(lambda u: (tf.identity(u), lambda g: 2.0 * g)),
    }

    @pytest.mark.parametrize("rule", NOT_LINEAR)
    @pytest.mark.parametrize("form", TRANSPOSED)
    def test_functions_that_are_not_linear(self, rule, form):
        make, mode = TRANSPOSED[form]
        run = traced(mode(make(lambda u, x: tf.function(self.NOT_LINEAR[rule])(u) * x)))
        assert is_loud(run, tf.constant(X), tf.constant(ALONG))

    @pytest.mark.parametrize("small", [1e-30, 1e-12])
    def test_what_is_small_is_not_rounding(self, small):
        relu = shared.with_jvp(lambda _, ts: (None, small * tf.nn.relu(ts[0])))
        assert is_loud(derivative(relu), tf.constant(X))


def _first_by_host(u):
    return tf.concat([near(u[:1]), u[1:]], 0)


def _softmax(u, x):
    s = tf.nn.softmax(x)
    return s * (u - tf.reduce_sum(s * u, -1, keepdims=True))


ONE_ZERO = np.arange(4.0)
SATURATED = np.array([[0.3, -0.2, 0.9], [17.0, 0.0, 0.5], [40.0, 1.0, 0.0]])
LONG = np.sin(np.arange(5003.0))
# Rules of which a part is lost, and the points.
LOST = {
    "one of many members": (lambda u, x: _first_by_host(u), LONG),
    "one of many rows": (lambda u, x: tf.reverse(_first_by_host(u), [1]), np.add.outer(LONG, [1, 2])),
    "a small member": (lambda u, x: _first_by_host(u) * [1.0, 1e5], [1.0, 2.0]),
    "beside log(0)": (lambda u, x: tf.reverse(_first_by_host(tf.reverse(u, [0])), [0]) / x, ONE_ZERO),
    "everything beside log(0)": (lambda u, x: tf.abs(u) / x, ONE_ZERO),
}  # fmt: skip
# Rules that are linear, and whose numbers may make one doubt it.
FINE = {
    "members of all sizes": (lambda u, x: u * tf.exp(x), [-30.0, 0.0, 30.0]),
    "log(0)": (lambda u, x: u / x, ONE_ZERO),
    "log(0) in a sum": (lambda u, x: tf.reduce_sum(u / x) + u, ONE_ZERO),
    "log(0) and another member": (lambda u, x: u / x + tf.reverse(u, [0]), ONE_ZERO),
    "rounding in one member": (_softmax, SATURATED),
    "weakly coupled": (lambda u, x: u * [1e3, 1.0] + 1e-5 * tf.reduce_sum(u * [1e3, 0.0]), [1.0, 2.0]),
    "nothing": (lambda u, x: 0 * u, [1.0, 2.0]),
    "many": (lambda u, x: tf.exp(3 * x) * u, LONG),
    "many sums": (lambda u, x: tf.cumsum(u * x), LONG),
    "no members": (lambda u, x: u * x, np.zeros([0, 3])),
}  # fmt: skip
SOME_WAYS = ["eager", "in tf.function", "around tf.function"]


class TestPartsThatAreLost:
    """What is large, many or not finite does not hide them."""

    @pytest.mark.parametrize(("form", "way", "rule"), spread(TRANSPOSED, SOME_WAYS, LOST))
    def test_are_found(self, form, way, rule):
        (make, mode), (rule, x) = TRANSPOSED[form], LOST[rule]
        x = tf.constant(x, tf.float32)
        run = WAYS[way](make(lambda u, x: rule(u, x) + 0 * x), mode)
        assert is_loud(run, x, tf.ones_like(x))

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("form", "way", "size"),
        spread(
            ["arguments", "results", "upstream", "gradients"],
            SOME_WAYS,
            [1.0, 1e6, 1e9],
        ),
    )
    def test_of_several(self, form, way, size):
        """Of which another is large."""
        two = shared.with_jvp(lambda _, ts: (None, size * ts[0] + near(ts[1])), lambda x, y: x + y)
        pair = shared.with_jvp(lambda _, ts: (None, (size * ts[0], near(ts[0]))), lambda x: (x, x))
        of_pair = sgtrick.custom_vjp(lambda x: ((x, x), lambda u, v: size * u + near(v)))
        of_two = sgtrick.custom_vjp(lambda x, y: (x + y, lambda u: (size * u, near(u))))
        mode, f = {
            "arguments": (reverse, lambda x: two(tf.stop_gradient(x), x)),
            "results": (reverse, lambda x: pair(x)[1]),
            "upstream": (forward, lambda x: of_pair(x)[1]),
            "gradients": (forward, lambda x: of_two(tf.stop_gradient(x), x)),
        }[form]
        assert is_loud(WAYS[way](f, mode), tf.constant(0.5), tf.constant(1.0))

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("form", "way", "rule", "dtype"),
        spread(TRANSPOSED, ["eager", "in XLA"], FINE, ["bfloat16", "float64"]),
    )
    def test_are_not_seen_where_nothing_is(self, form, way, rule, dtype):
        (make, mode), (rule, x) = TRANSPOSED[form], FINE[rule]
        x = tf.cast(x, dtype)
        f = make(lambda u, x: tf.cast(rule(*(tf.cast(t, dtype) for t in (u, x))), dtype))
        came = WAYS[way](f, mode)(x, tf.ones_like(x))
        with tf.GradientTape() as tape:
            u = tf.ones_like(x)
            tape.watch(u)
            y = rule(u, x)
        expected = tape.gradient(y, u, tf.ones_like(x))
        np.testing.assert_array_equal(tf.math.is_finite(came), tf.math.is_finite(expected))


def _scaled(pull):
    return sgtrick.custom_vjp(lambda x: (2 * x, pull))


@pytest.mark.long
class TestRulesInRules:
    """What is transposed may contain another rule, which need not be linear."""

    RIGHT = staticmethod(_scaled(lambda u: 2 * u))
    WRONG = staticmethod(_scaled(lambda u: 2 * tf.abs(u)))

    @pytest.mark.parametrize("way", ["eager", "in tf.function", "in XLA"])
    def test_forward_over_reverse(self, way):
        """Of `from_value_and_gradient`, whose gradient is transposed."""

        def run(inner):
            form = sgtrick.from_value_and_gradient(lambda x: (x**2, inner(x)))
            return WAYS[way](derivative(form), forward)

        x, along = tf.constant(X), tf.constant(ALONG)
        np.testing.assert_allclose(run(self.RIGHT)(x, along), 2 * ALONG, rtol=1e-12)
        assert is_loud(run(self.WRONG), x, along)

    @pytest.mark.parametrize("way", ["eager", "in tf.function"])
    def test_implicit_functions(self, way):
        """Of `y**3 = 2 a`, where a rule in the residual is pulled back."""

        def run(inner):
            def root(a):
                star = tf.stop_gradient(tf.sign(a) * tf.abs(2 * a) ** (1 / 3))
                return sgtrick.implicit_root(lambda y, a: y**3 - inner(a), star, a, batch_ndims=2)

            return WAYS[way](root, forward)

        x, along = tf.constant(X), tf.constant(ALONG)
        expected = 2 * ALONG / (3 * np.cbrt(2 * X) ** 2)
        np.testing.assert_allclose(run(self.RIGHT)(x, along), expected, rtol=1e-9)
        assert is_loud(run(self.WRONG), x, along)


class TestRulesThatReadTangents:
    """What runs eagerly may read numbers that no operation tells."""

    READING: ClassVar = {
        "sign": lambda t: t * np.sign(t),
        "a branch": lambda t: t if t[0, 0] > 0 else -t,
        "the largest": lambda t: t * float(tf.reduce_max(t)),
        "numpy": lambda t: t * (t.numpy() > 0),
    }

    @pytest.mark.parametrize("rule", READING)
    def test_are_loud(self, rule):
        run = reverse(with_jvp(lambda t, _: self.READING[rule](t)))
        with pytest.raises(LookupError, match="the rule is not linear in the tangents"):
            run(tf.constant(X), tf.constant(ALONG))
