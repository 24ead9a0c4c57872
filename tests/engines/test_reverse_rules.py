"""Functions of PyTorch and JAX with a rule for reverse mode alone, and those differentiated once."""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from array_model import RAISED, WAYS, found_in
from matrix import spread
from shared import compiled, derivative, forward_derivative, mapped, pushed

X = np.array([[0.5, 2.0], [1.0, -1.0], [-0.3, 0.7]])
T = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.2]])


def true(x):
    return tf.stack([x[..., 0] ** 3 * x[..., 1], tf.sin(x[..., 1])], -1)


def jacobian(np, x):
    zero = 0 * x[0]
    return [[3 * x[0] ** 2 * x[1], x[0] ** 3], [zero, np.cos(x[1])]]


def product(np, x, u):
    """Of the transposed Jacobian."""
    rows = jacobian(np, x)
    return np.stack([rows[0][k] * u[0] + rows[1][k] * u[1] for k in (0, 1)])


def jax_function(vjp=product):
    jax = pytest.importorskip("jax")

    @jax.custom_vjp
    def f(x):
        return jax.numpy.stack([x[0] ** 3 * x[1], jax.numpy.sin(x[1])])

    f.defvjp(lambda x: (f(x), x), lambda x, u: (vjp(jax.numpy, x, u),))
    return f


def torch_function(vjp=product):
    torch = pytest.importorskip("torch")

    class F(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return torch.stack([x[0] ** 3 * x[1], torch.sin(x[1])])

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, u):
            return vjp(torch, *ctx.saved_tensors, u)

    return F.apply


def odes(x):
    """`exp(-x)`, whose rule for reverse mode solves an equation by another such call."""
    jax, ode = pytest.importorskip("jax"), pytest.importorskip("jax.experimental.ode")
    times = jax.numpy.array([0.0, 1.0], x.dtype)
    return ode.odeint(lambda y, t, x: -x * y, jax.numpy.ones_like(x), times, x)[-1]


def in_a_loop(np, x, u):
    """The same product by a loop, which JAX does not differentiate in reverse mode."""
    jax = pytest.importorskip("jax")
    return jax.lax.while_loop(
        lambda i: i[0] < 2, lambda i: (i[0] + 1, i[1] + product(np, x, u) / 2), (0, 0 * x)
    )[1]


MAKE = {
    "torch": lambda **o: sgtrick.from_torch(torch_function(**o), value_shape=(2,)),
    "jax": lambda **o: sgtrick.from_jax(jax_function(**o)),
    "native": lambda **o: sgtrick.from_jax(jax_function(**o), native=True),
}


def first(f):
    return derivative(lambda x: f(x) * T)(tf.constant(X))


def forward(f):
    return pushed(f, tf.constant(X), tf.constant(T))


def second(f):
    return derivative(derivative(lambda x: tf.sin(f(x))))(tf.constant(X))


def forward_over_reverse(f):
    return pushed(derivative(f), tf.constant(X), tf.constant(T))


LAWS = [first, forward, second, forward_over_reverse]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "law", "way"),
    spread(MAKE, LAWS, ["eager", "in tf.function", "around tf.function"]),
)
def test_have_all_derivatives(kind, law, way):
    """By reverse mode twice."""
    np.testing.assert_allclose(
        found_in(WAYS[way], law, MAKE[kind]()), law(true), rtol=1e-9, atol=1e-12
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", MAKE)
def test_of_one_point_and_of_a_number(kind):
    for f, g in ((MAKE[kind](), true), (of_number(kind), lambda x: tf.reduce_sum(true(x), -1))):
        x = tf.constant(X[0])
        np.testing.assert_allclose(forward_derivative(f)(x), forward_derivative(g)(x))
        run, want = derivative(derivative(f)), derivative(derivative(g))
        np.testing.assert_allclose(run(x), want(x))


def of_number(kind):
    if kind == "torch":
        return sgtrick.from_torch(lambda x: torch_function()(x).sum())
    return sgtrick.from_jax(lambda x: jax_function()(x).sum(), native=kind == "native")


@pytest.mark.long
@pytest.mark.parametrize(
    ("native", "law", "way"), [(False, forward, "eager"), (True, first, "around tf.function")]
)
def test_ordinary_differential_equations(native, law, way):
    f = sgtrick.from_jax(odes, native=native)
    came, want = found_in(WAYS[way], law, f), law(lambda x: tf.exp(-x))
    np.testing.assert_allclose(came, want, rtol=1e-5, atol=1e-5)


RULES = {
    "clipped": lambda np, x, u: product(np, x, np.clip(u, -1, 1)),
    "of one sign": lambda np, x, u: product(np, x, abs(u)),
    "of the same for all": lambda np, x, u: product(np, x, 0 * u + 1),
}


@pytest.mark.parametrize(("kind", "rule"), spread(["torch", "jax"], RULES, together=1))
def test_a_rule_that_is_not_linear_has_no_forward_mode(kind, rule):
    h = MAKE[kind](vjp=RULES[rule])
    u = tf.constant(T)
    with tf.GradientTape() as tape:
        x = tf.constant(X)
        tape.watch(x)
        y = h(x)
    want = [RULES[rule](np, x, u) for x, u in zip(X, T, strict=True)]
    np.testing.assert_allclose(tape.gradient(y, x, u), want)
    with pytest.raises(RAISED, match=r"a rule for reverse mode alone, which is not linear .* jvp="):
        forward(h)


@pytest.mark.parametrize("around", [lambda f: f, tf.function, mapped])
def test_it_is_nan_inside_the_graph(around):
    assert np.isnan(forward(around(MAKE["native"](vjp=RULES["clipped"])))).all()


class TestDifferentiatedOnce:
    """Second derivatives that JAX cannot compute are unknown, and nobody has to ask for them."""

    X = tf.constant(X)
    PLACES = {
        "eager": lambda f: f,
        "in tf.function": tf.function,
        "in XLA": compiled,
        "in map_fn": lambda f: lambda x: tf.map_fn(f, x),
        "in while_loop": lambda f: (
            lambda x: tf.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, f(y)), (0, x))[1]
        ),
        "in cond": lambda f: tf.function(lambda x: tf.cond(x[0, 0] > 0, lambda: f(x), lambda: x)),
        "in vectorized_map": mapped,
    }

    @pytest.mark.parametrize(
        "place",
        [pytest.param(p, marks=[pytest.mark.long] * (p != "in tf.function")) for p in PLACES],
    )
    def test_first_derivatives_are_right_everywhere(self, place):
        h = MAKE["native"](vjp=in_a_loop)
        run = self.PLACES[place]
        np.testing.assert_allclose(run(h)(self.X), true(self.X))
        np.testing.assert_allclose(run(derivative(h))(self.X), derivative(true)(self.X))
        np.testing.assert_allclose(derivative(run(h))(self.X), derivative(true)(self.X))

    @pytest.mark.parametrize("kind", ["jax", "native"])
    def test_second_ones_are_errors(self, kind):
        h = MAKE[kind](vjp=in_a_loop)
        message = "(?s)(cannot compute|raised).*mode.*from_numpy"
        second = derivative(derivative(lambda x: tf.sin(h(x))))
        for run in (second, tf.function(second)):
            with pytest.raises(RAISED, match=message):
                run(self.X)
        with pytest.raises(RAISED, match=message):
            forward(h)
