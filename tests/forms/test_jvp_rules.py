"""JVP rules: what they get by keyword, what they may return as the value, and branches in them."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from matrix import spread
from shared import (
    FIRST_WAYS,
    WAYS,
    WRAPS,
    constant,
    derivative,
    forward_derivative,
    gradient,
    gradients,
    mapped,
    with_jvp,
)

X = constant([1.0, 2.0])
MODES = pytest.mark.parametrize("mode", [derivative, forward_derivative])


def power(x, *, scale=2.0, n=2):
    return scale * x**n


def of_power(primals, tangents, *, scale, n):
    return power(*primals, scale=scale, n=n), scale * n * primals[0] ** (n - 1) * tangents[0]


RULES = {
    "by name": of_power,
    "any": lambda p, t, **options: of_power(p, t, **options),
    "by position": lambda p, t, n, scale: of_power(p, t, scale=scale, n=n),
    "itself": lambda p, t, **options: (OF_ITSELF(*p, **options), of_power(p, t, **options)[1]),
}
OF_ITSELF = with_jvp(RULES["itself"], power)


class TestKeywords:
    """Keyword-only arguments count as without derivatives, and arrive by keyword."""

    @pytest.mark.parametrize(("rule", "way"), spread(RULES, FIRST_WAYS, together=1))
    def test_reach_the_rule(self, rule, way):
        h = OF_ITSELF if rule == "itself" else with_jvp(RULES[rule], power)
        for options in ({}, {"scale": 5.0}, {"n": 3, "scale": constant(7.0)}):
            run = functools.partial(h, **options)
            expected = derivative(functools.partial(power, **options))(X)
            np.testing.assert_allclose(run(X), power(X, **options))
            np.testing.assert_allclose(FIRST_WAYS[way](run)(X), expected, rtol=1e-12)

    @WRAPS
    @MODES
    def test_a_rule_need_not_take_defaults(self, mode, wrap):
        short = lambda p, t: (None, 4 * p[0] * t[0])  # noqa: E731
        partial = functools.partial(power, scale=2.0)
        for f in (power, partial, functools.partial(lambda x, scale: scale * x**2, scale=2.0)):
            h = with_jvp(short, f)
            np.testing.assert_allclose(wrap(mode(h))(X), 4 * X)
        h = with_jvp(short, power)
        other = lambda x: h(x, n=3)  # noqa: E731
        np.testing.assert_allclose(wrap(other)(X), 2 * X**3)
        with pytest.raises(TypeError, match=r"rule of power cannot take the .* 'n', which does"):
            wrap(mode(other))(X)

    @WRAPS
    def test_tensors_keep_autodiff(self, wrap):
        run = lambda x, s: OF_ITSELF(x, scale=s)  # noqa: E731
        by_x, by_s = wrap(lambda *a: gradients(run, *a))(X, constant(3.0))
        np.testing.assert_allclose(by_x, 6 * X)
        assert by_s == 5
        np.testing.assert_allclose(wrap(derivative(derivative(run), 1))(X, constant(3.0)), 6)

    def test_of_any_name_and_of_methods(self):
        class Model:
            @sgtrick.custom_jvp(nondiff_argnums="n")
            def h(self, x, n, **options):
                return options["scale"] * x**n

            @h.defjvp
            def _(self, n, primals, tangents, *, scale):
                return None, scale * n * primals[0] ** (n - 1) * tangents[0]

        found = derivative(lambda x: Model().h(n=3, x=x, scale=constant(2.0)))(X)
        np.testing.assert_allclose(found, 6 * X**2)


NESTED = {
    "pair": (lambda y: (y, None), lambda y: y[0]),
    "dictionary": (lambda y: {"a": None, "b": [y, None]}, lambda y: y["b"][0]),
}


@pytest.mark.parametrize("nested", NESTED)
@WRAPS
def test_none_among_outputs(nested, wrap):
    """It has no tangent."""
    make, get = NESTED[nested]
    h = with_jvp(lambda p, t: (h(*p), make(2 * p[0] * t[0])), lambda x: make(x**2))
    y = wrap(h)(X)
    tf.nest.assert_same_structure(y, make(X))
    assert sum(leaf is None for leaf in tf.nest.flatten(y)) == len(tf.nest.flatten(y)) - 1
    np.testing.assert_allclose(get(y), X**2)
    run = lambda x: get(h(x))  # noqa: E731
    for of, expected in (
        (derivative(run), 2 * X),
        (forward_derivative(run), 2 * X),
        (derivative(lambda x: tf.vectorized_map(run, x)), 2 * X),
        (derivative(derivative(run)), [2, 2]),
    ):
        np.testing.assert_allclose(wrap(of)(X), expected)
    wrong = with_jvp(lambda p, t: (None, (t[0], t[0])), lambda x: (x**2, None))
    with pytest.raises(TypeError, match=r"\[1\] is None, but it has a tangent"):
        wrap(derivative(lambda x: wrong(x)[0]))(X)


# What a rule may return as the value of `x**2`, and what not.
PRIMALS = {
    "itself": (lambda x: x**2, None),
    "none": (lambda x: None, None),
    "other numbers": (lambda x: 0 * x, None),
    "array": (lambda x: np.zeros(2), None),
    "another shape": (lambda x: x[:1], r"primal_out for .* has shape \[1\], the value \[2\]"),
    "a sum": (tf.reduce_sum, r"primal_out for .* has shape \[\], the value \[2\]"),
    "a number": (lambda x: 1.0, r"primal_out for .* has shape \[\], the value \[2\]"),
    "another dtype": (lambda x: tf.cast(x, tf.float32), "dtype float32 for .*, the value float64"),
    "an array of another dtype": (
        lambda x: np.zeros(2, int),
        "dtype int64 for .*, the value float64",
    ),
    "text": (lambda x: "x", "primal_out has dtype none, str for"),
    "another structure": (lambda x: {"y": x}, "primal_out must have the structure of"),
}


@pytest.mark.parametrize("kind", PRIMALS)
@WRAPS
def test_the_value_that_a_rule_returns(kind, wrap):
    """It has to look like the value, which is never that of the rule."""
    returned, message = PRIMALS[kind]
    jvp = lambda p, t: (returned(p[0]), 2 * p[0] * t[0])  # noqa: E731
    both = sgtrick.custom_vjp(lambda x: (x**2, lambda u: u * 2 * x))
    both.defjvp(jvp)
    for h, modes in (
        (with_jvp(jvp, lambda x: x**2), (derivative, forward_derivative)),
        (both, (forward_derivative,)),
    ):
        np.testing.assert_allclose(wrap(h)(X), X**2)
        for mode in modes:
            if message is None:
                np.testing.assert_allclose(wrap(mode(h))(X), 2 * X)
            else:
                with pytest.raises((TypeError, ValueError), match=message):
                    wrap(mode(h))(X)


TABLE = np.array([[0.9, -0.4, 2.1], [0.3, 1.7, -1.2]])
GATHERING = {
    "gather": lambda t: tf.gather(t, [2, 0, 1], axis=-1),
    "rows": lambda t: tf.gather(t, [1, 0, 1]),
    "lookup": lambda t: tf.nn.embedding_lookup(t, [1, 1, 0]),
    "gather_nd": lambda t: tf.gather_nd(t, [[1, 2], [0, 0]]),
    "mask": lambda t: tf.boolean_mask(t, TABLE > 0),
    "both": lambda t: tf.concat([tf.gather(t, [1, 1]), 2 * t], 0),
}


class TestRulesThatGather:
    """Their transposes are `tf.IndexedSlices`, in graphs too."""

    @pytest.mark.parametrize("way", ["eager", "in tf.function", "around tf.function"])
    @pytest.mark.parametrize("rule", GATHERING)
    def test_are_right(self, rule, way):
        f = GATHERING[rule]
        form = with_jvp(lambda xs, ts: (f(xs[0]), f(ts[0])), f)
        x = constant(TABLE)
        shape = f(x).shape
        u = tf.constant(np.arange(1.0, 1 + shape.num_elements()).reshape(shape))
        found, expected = (
            WAYS[way](g, lambda h: lambda x: gradient(h, x, u))(x) for g in (form, f)
        )
        found, expected = map(tf.convert_to_tensor, (found, expected))
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def by_if(x, t):
    if x > 0:
        t = tf.cos(x) * t
    else:
        t = -tf.cos(x) * t
    return t


def by_cond(x, t):
    return tf.cond(x > 0, lambda: tf.cos(x) * t, lambda: -tf.cos(x) * t)


BRANCHES = {
    "cond": by_cond,
    "if": by_if,
    "switch_case": lambda x, t: tf.switch_case(
        tf.cast(x > 0, tf.int32), [lambda: -tf.cos(x) * t, lambda: tf.cos(x) * t]
    ),
    "in a function": lambda x, t: tf.function(by_cond)(x, t),
    "of one tangent": lambda x, t: tf.sign(x) * tf.cos(x) * t / 2 + by_cond(x, t / 2),
}
MAPPED = {
    "eager": lambda f: derivative(mapped(f)),
    "in tf.function": lambda f: tf.function(derivative(mapped(f))),
    "around tf.function": lambda f: derivative(tf.function(mapped(f))),
    "forward around tf.function": lambda f: forward_derivative(tf.function(mapped(f))),
    "XLA": lambda f: tf.function(derivative(mapped(f)), jit_compile=True),
    "unknown size": lambda f: tf.function(
        derivative(mapped(f)), input_signature=[tf.TensorSpec([None], tf.float64)]
    ),
}


def of_branches(rule):
    return with_jvp(lambda p, t: (None, rule(*p, *t)), lambda x: tf.sin(tf.abs(x)))


class TestBranchesThatUseTangents:
    """TensorFlow maps a branch, but not its gradient, so the rule is mapped and then transposed."""

    POINTS = np.array([0.5, -1.0, 2.0])

    @pytest.mark.parametrize(
        ("branch", "way"),
        [
            ("if", "in tf.function"),
            *(
                pytest.param(*case, marks=pytest.mark.long)
                for case in [("cond", "XLA"), *spread(BRANCHES, MAPPED, together=1)]
            ),
        ],
    )
    def test_are_mapped(self, branch, way):
        h, x = of_branches(BRANCHES[branch]), constant(self.POINTS)
        expected = np.sign(self.POINTS) * np.cos(self.POINTS)
        np.testing.assert_allclose(tf.convert_to_tensor(MAPPED[way](h)(x)), expected)

    def test_of_one_member(self):
        found = derivative(mapped(of_branches(by_cond)))(constant([-1.0]))
        np.testing.assert_allclose(tf.convert_to_tensor(found), [-np.cos(1.0)])

    @pytest.mark.long
    @pytest.mark.parametrize("branch", BRANCHES)
    def test_that_are_not_linear_are_loud(self, branch):
        h = of_branches(lambda x, t: BRANCHES[branch](x, tf.abs(t)))
        found = tf.function(derivative(mapped(h)))(constant(self.POINTS))
        assert np.all(np.isnan(found))

    @pytest.mark.long
    def test_in_forward_mode(self):
        with pytest.raises(NotImplementedError, match="cannot map the gradient of a branch"):
            forward_derivative(mapped(of_branches(by_cond)))(constant(self.POINTS))
