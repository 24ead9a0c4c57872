"""Roots and samples: derivatives by the equation that defines them."""

import collections
import contextlib

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

from matrix import Case, judge, pairs, promised, spread
from matrix import functions as fn
from matrix.values import MATRICES, NUMBERS
from sgtrick import from_numpy, implicit_reparameterize, implicit_root
from shared import EXECUTED, FIRST_WAYS, WRAPS, derivative, forward_derivative, on_host
from shared import gradient as grad

tfd = tfp.distributions


def coupled_roots(x, y):
    """`u * v = fn.two(x, y)` by two roots of coupled, curved equations, given without derivatives."""

    def residual(root, theta):
        u, v = root["u"], root["v"][0]
        a = u - tf.sin(theta["y"][0])
        b = v - tf.reduce_sum(theta["x"] ** 3, [-2, -1])
        return {"u": a * (2 + u**2) + b, "v": [tf.sin(a) + b * tf.exp(v / 9)]}

    star = {"u": tf.sin(y), "v": [tf.reduce_sum(x**3, [-2, -1])]}
    batch_ndims = 0 if y.shape.rank is None else y.shape.rank
    root = implicit_root(residual, star, {"x": x, "y": (y,)}, batch_ndims=batch_ndims)
    return root["u"] * root["v"][0]


# asinh_forms.py has a root in every nesting of the modes, of which one is slow here.
CASE = Case("coupled roots", fn.two, coupled_roots, (MATRICES, NUMBERS), order=2)
PAIRS = [
    pair
    for pair in pairs([CASE], everywhere=set())
    if pair.values[1].name != "`tape.batch_jacobian`"
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "cell"), PAIRS, ids=lambda of: of.name)
def test_matrix(case, cell):
    # The equation's own rules within the rule reach for tensors of the mapped function.
    loud = {"raises", "NaN"} if cell.name == "nested tapes around `vectorized_map`" else set()
    assert judge(cell, case) in promised(cell, case) | loud


def newton(residual, x, theta, steps):
    """An unrolled solver, for autodiff."""
    for _ in range(steps):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            r = residual(x, theta)
        # Without pfor, which would trace every step.
        jacobian = tape.batch_jacobian(r, x, experimental_use_pfor=False)
        x -= tf.linalg.matvec(tf.linalg.inv(jacobian), r)
    return x


def kepler(x, theta):
    """Two coupled equations of Kepler's kind, `[members, 2]`, with theta of `[3]` for all."""
    a, b = x[:, 0], x[:, 1]
    return tf.stack(
        [a - theta[0] * tf.sin(b) - theta[1], b + theta[2] * tf.cos(a * b) - theta[0] * a**2], 1
    )


@pytest.mark.long
def test_equals_autodiff_of_an_unrolled_solver():
    """First and second derivatives by what the members share."""
    theta = tf.constant([0.3, 0.7, -0.2], tf.float64)
    weights = np.array([[1.0, -2.0], [0.5, 3.0]])
    start = tf.constant([[0.5, 0.2], [0.9, -0.3]], tf.float64)

    def both(solution):
        def first(theta):
            return grad(solution, theta, weights)

        return lambda theta: (first(theta), grad(first, theta, np.array([1.0, -2.0, 3.0])))

    star = newton(kepler, start, theta, 6)
    want = both(lambda theta: newton(kepler, start, theta, 6))(theta)
    for n in (0, 1):
        root = lambda theta: implicit_root(kepler, star, theta, batch_ndims=n)  # noqa: B023, E731
        for a, b in zip(tf.function(both(root))(theta), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)
            assert np.abs(b).max() > 0.1


@pytest.mark.long
@WRAPS
def test_every_order(wrap):
    """Cube roots, whose derivatives are known."""

    def derivatives(a):
        with contextlib.ExitStack() as stack:
            tapes = [stack.enter_context(tf.GradientTape()) for _ in range(3)]
            for tape in tapes:
                tape.watch(a)
            star = tf.pow(tf.stop_gradient(a), 1 / 3)
            found = [implicit_root(lambda x, a: x**3 - a, star, a)]
            for tape in reversed(tapes):
                found.append(tape.gradient(found[-1], a))
        return found

    a = tf.constant(0.7, tf.float64)
    exact = [a ** (1 / 3)]
    for k in range(3):
        exact.append(exact[-1] * (1 / 3 - k) / a)
    np.testing.assert_allclose(wrap(derivatives)(a), exact, rtol=1e-10)


@pytest.mark.long
def test_autograph_converts_the_residual():
    def residual(x, a):
        if a > 0:
            return x**2 - a
        return x**2 + a

    def cdf(sample, a):
        if a > 0:
            return sample * a
        return sample / a

    def square_root(a):
        return implicit_root(residual, tf.sqrt(tf.abs(a)), a)

    def scaled(a):
        return implicit_reparameterize(cdf, tf.constant(0.5, tf.float64), a)

    for a in tf.constant([4.0, -4.0], tf.float64):
        np.testing.assert_allclose(tf.function(grad)(square_root, a), np.sign(a) / 4)
        np.testing.assert_allclose(tf.function(grad)(scaled, a), -0.5 / tf.abs(a))


def test_what_the_residual_closes_over_is_differentiated():
    a, v = tf.constant(2.0), tf.Variable(3.0)
    star = tf.sqrt(a * v)
    with tf.GradientTape() as tape:
        tape.watch(a)
        x = implicit_root(lambda x: x**2 - a * v, tf.stop_gradient(star))
    by_a, by_v = tape.gradient(x, [a, v])
    np.testing.assert_allclose([by_a, by_v], [v / star / 2, a / star / 2], rtol=1e-6)


ONE_TENSOR = {
    "twice": lambda a, root: root(lambda x, p, q: x**2 * p - q**2, a, a),
    "nested": lambda a, root: root(lambda x, d: x**2 * d["p"] - d["q"] ** 2, {"p": a, "q": a}),
    "closed over": lambda a, root: root(lambda x, p: x**2 * p - a**2, a),
}


@pytest.mark.long
@pytest.mark.parametrize(("places", "way"), spread(ONE_TENSOR, FIRST_WAYS, together=1))
def test_one_tensor_in_several_places(places, way):
    """The square root, as the root of `x^2 a = a^2`."""

    def root(a):
        return ONE_TENSOR[places](a, lambda f, *at: implicit_root(f, tf.sqrt(a), *at))

    a = tf.constant(4.0, tf.float64)
    np.testing.assert_allclose(FIRST_WAYS[way](root)(a), 1 / 4, rtol=1e-9)
    np.testing.assert_allclose(derivative(derivative(root))(a), -1 / 32, rtol=1e-9)


STRUCTURES = {
    "deque": collections.deque,
    "UserList": collections.UserList,
    "values of a dictionary": lambda pair: dict(zip("vu", pair, strict=True)).values(),
    "a range among the arguments": tuple,
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_structures_are_those_of_tf_nest(make):
    """Of the root, and of what the residual is passed."""

    def residual(x, at, powers):
        assert list(powers) == [1, 2]
        return make([t**power - s for t, power, s in zip(x, powers, at, strict=True)])

    def root(a):
        star = make([a, tf.sqrt(a)])
        return tf.add_n(list(implicit_root(residual, star, make([a, a]), range(1, 3))))

    np.testing.assert_allclose(grad(root, tf.constant(4.0)), 1 + 1 / 4, rtol=1e-6)


def in_branch(v, x):
    return tf.cond(x > 0, lambda: v * x**2, lambda: v * x)


READERS = {
    "itself": lambda v: lambda x, a: v * x**2 - a,
    "in a branch": lambda v: lambda x, a: in_branch(v, x) - a,
    "in a function": lambda v: tf.function(lambda x, a: v * x**2 - a),
    "in a loop": lambda v: (
        lambda x, a: (
            tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, v * y), (0, x**2))[1] - a
        )
    ),
}


class TestVariables:
    """`x = sqrt(a / v)`, where the residual reads `v`."""

    DERIVATIVES = (1 / 4, -1.0)  # at a = 4, v = 1

    @staticmethod
    def run(reader, *, trainable=True, then=lambda v: None):
        v = tf.Variable(1.0, trainable=trainable)
        residual = reader(v)

        def run(a):
            with tf.GradientTape() as tape:
                tape.watch([a, v])
                x = implicit_root(residual, tf.constant(2.0), a)
            then(v)
            return tape.gradient(x, [a, v])

        return run

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("reader", "trainable", "way"), spread(READERS, [True, False], EXECUTED)
    )
    def test_are_differentiated(self, reader, trainable, way):
        run = EXECUTED[way](self.run(READERS[reader], trainable=trainable))
        np.testing.assert_allclose(run(tf.constant(4.0)), self.DERIVATIVES, rtol=1e-6)

    @pytest.mark.long
    @pytest.mark.parametrize("trainable", [True, False])
    def test_in_forward_mode_and_again(self, trainable):
        v = tf.Variable(1.0, trainable=trainable)
        root = lambda: implicit_root(lambda x: v * x**2 - 4.0, tf.constant(2.0))  # noqa: E731
        with tf.autodiff.ForwardAccumulator(v, tf.constant(1.0)) as accumulator:
            x = root()
        np.testing.assert_allclose(accumulator.jvp(x), -1.0, rtol=1e-6)
        second = grad(lambda v: grad(lambda _: root(), v), v)
        np.testing.assert_allclose(second, 1.5, rtol=1e-6)

    @pytest.mark.long
    @pytest.mark.parametrize("reader", READERS)
    def test_are_an_error_if_they_were_assigned(self, reader):
        run = lambda: self.run(READERS[reader], then=lambda v: v.assign(100.0))  # noqa: E731
        message = "variable that was assigned between the call and the gradient"
        with pytest.raises(LookupError, match=message):
            run()(tf.constant(4.0))
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            tf.function(run())(tf.constant(4.0))


OF_A_LIST = r"residual closes over a tf\.TensorArray, .* Read the array before"


def test_a_list_that_the_residual_closes_over():
    """In a graph nothing tells what it was made of; what was read before is right."""

    def root(a, b, residual):
        array = tf.TensorArray(tf.float32, 1, clear_after_read=False).write(0, a)
        return implicit_root(residual(array), tf.constant(2.0), b)

    def read_inside(array):
        return lambda x, b: x**2 - array.read(0) * b

    def read_before(array):
        a = array.read(0)
        return lambda x, b: x**2 - a * b

    def by_both(residual):
        return grad(lambda ab: root(*ab, residual), [tf.constant(2.0), tf.constant(2.0)])

    np.testing.assert_allclose(by_both(read_inside), [1 / 2, 1 / 2])
    np.testing.assert_allclose(tf.function(by_both)(read_before), [1 / 2, 1 / 2])
    with pytest.raises(ValueError, match=OF_A_LIST):
        tf.function(by_both)(read_inside)


same_on_host = on_host(lambda x: x)


class TestHostCalls:
    """`x = sqrt(a)`, where the residual passes a part of itself through the host."""

    MESSAGE = "residual was differentiated with respect to something that it passes to a host call"
    B, V = tf.constant(1.0), tf.Variable(1.0)
    ROOTS = {
        "a part of x": lambda a: implicit_root(lambda x, a: x * same_on_host(x) - a, 2.0, a),
        "theta": lambda a: implicit_root(lambda x, a: x**2 - same_on_host(a), 2.0, a),
        "a part of theta": lambda a: implicit_root(
            lambda x, a: x**2 - a * same_on_host(a) / 4, 2.0, a
        ),
        "another argument": lambda a: implicit_root(
            lambda x, a, b: x**2 - a * same_on_host(b), 2.0, a, TestHostCalls.B
        ),
        "a variable": lambda a: implicit_root(
            lambda x, a: x**2 - a * same_on_host(tf.identity(TestHostCalls.V)), 2.0, a
        ),
        "what it closes over": lambda a: implicit_root(lambda x: x**2 - same_on_host(a), 2.0),
    }

    @pytest.mark.long
    @pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
    def test_raise(self, root):
        a = tf.constant(4.0)
        with pytest.raises(LookupError, match=self.MESSAGE):
            grad(root, a)
        with pytest.raises(tf.errors.InvalidArgumentError, match=self.MESSAGE):
            tf.function(grad)(root, a)

    @pytest.mark.long
    def test_raise_or_give_nan_elsewhere(self):
        root, a = self.ROOTS["a part of theta"], tf.constant(4.0)
        assert np.isnan(grad(tf.function(root), a))
        with pytest.raises(tf.errors.InvalidArgumentError, match=self.MESSAGE):
            forward_derivative(root)(a)
        assert np.isnan(forward_derivative(tf.function(root))(a))

    @WRAPS
    @pytest.mark.parametrize(
        "residual",
        [
            lambda x, a: x**2 - a * same_on_host(tf.constant(1.0)),
            lambda x, a: x**2 - a * tf.cast(on_host(np.sign)(tf.cast(a, tf.int32)), a.dtype),
            lambda x, a: x**2 - a * tf.stop_gradient(same_on_host(a)) / 4,
        ],
        ids=["of a constant", "of integers", "stopped"],
    )
    def test_leave_other_derivatives_right(self, residual, wrap):
        root = lambda a: implicit_root(residual, tf.constant(2.0), a)  # noqa: E731
        np.testing.assert_allclose(wrap(grad)(root, tf.constant(4.0)), 1 / 4, rtol=1e-6)

    @pytest.mark.long
    @WRAPS
    def test_with_gradients_of_their_own_are_right(self, wrap):
        square = from_numpy(
            lambda x: (x**2, 2 * x), event_ndims=0, hessp=lambda x, v: 2 * v, vectorized=True
        )
        root = lambda a: implicit_root(lambda x, a: square(x) - a, tf.constant(2.0), a)  # noqa: E731
        run = wrap(lambda a: [grad(root, a), grad(lambda a: grad(root, a), a)])
        np.testing.assert_allclose(run(tf.constant(4.0)), [1 / 4, -1 / 32], rtol=1e-6)


def test_value_is_kept_at_points_that_are_no_roots():
    star = tf.constant([np.inf, np.nan, -np.inf, 2.5])
    theta = tf.constant([1.0, 1.0, 1.0, 4.0])
    with tf.GradientTape() as tape:
        tape.watch(theta)
        x = implicit_root(lambda x, t: x**2 - t, star, theta, batch_ndims=1)
    np.testing.assert_array_equal(x, star)
    assert tape.gradient(x, theta)[3] == 0.2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(dtype):
    for n in (1, 2):
        theta = tf.cast([[4.0] * n], dtype)
        h = lambda t: implicit_root(lambda x, t: x**2 - t, tf.cast([[2.0] * n], dtype), t)  # noqa: B023, E731
        g = grad(h, theta)
        assert g.dtype == h(theta).dtype == dtype
        np.testing.assert_array_equal(tf.cast(g, "float64"), [[0.25] * n])


def test_gamma():
    """TFP's own gradients are the oracle."""
    a, b = tf.constant([0.3, 1.0, 5.0], tf.float64), tf.constant([2.0, 0.5, 1.0], tf.float64)
    upstream = tf.random.stateless_normal([50, 3], [1, 2], dtype=tf.float64)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([a, b])
        theirs = tfd.Gamma(a, b).sample(50, seed=[3, 4])
        ours = implicit_reparameterize(lambda x, a, b: tf.math.igamma(a, b * x), theirs, a, b)
    np.testing.assert_array_equal(ours, theirs)
    gradients = [tape.gradient(sample, [a, b], upstream) for sample in (ours, theirs)]
    for came, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(came, want, rtol=1e-6)


X = tf.constant([1.0, 2.0])
ERRORS = {
    "int root": (
        lambda: implicit_root(lambda x: x, 1),
        TypeError,
        "x_star has dtype int32, expected a floating dtype",
    ),
    "complex root": (
        lambda: implicit_root(lambda x: x, 1j),
        TypeError,
        "x_star has dtype complex128.*real and imaginary",
    ),
    "several dtypes": (
        lambda: implicit_root(lambda x: x, [X, tf.cast(X, tf.float64)]),
        TypeError,
        "x_star must have a single dtype, got float32, float64",
    ),
    "residual of another dtype": (
        lambda: implicit_root(lambda x: tf.cast(x, tf.float64), X),
        TypeError,
        "the result of residual has dtype float64, expected float32",
    ),
    "residual of another shape": (
        lambda: implicit_root(lambda x: x[:1], X),
        ValueError,
        r"the result of residual has shape \[1\], x_star \[2\]",
    ),
    "unconnected": (
        lambda: implicit_root(lambda x: tf.round(X), X),
        ValueError,
        "residual returned something that is not connected to its first argument, x_star",
    ),
    "too many batch dimensions": (
        lambda: implicit_root(lambda x: x, X, batch_ndims=2),
        ValueError,
        r"x_star must have the same leading batch_ndims=2 dimensions in all leaves, got \[2\]",
    ),
    "solve and batch": (
        lambda: implicit_root(lambda x: x, X, batch_ndims=1, solve=lambda _, b: b),
        ValueError,
        "batch_ndims=1 was passed together with solve",
    ),
    "solution of another shape": (
        lambda: grad(
            lambda a: implicit_root(lambda x, a: x - a, X, a, solve=lambda _, b: b[:1]), X
        ),
        ValueError,
        r"the result of solve has shape \[1\], x_star \[2\]",
    ),
    "argument of matvec of another dtype": (
        lambda: grad(
            lambda a: implicit_root(
                lambda x, a: x - a, X, a, solve=lambda matvec, b: matvec(tf.cast(b, tf.float64))
            ),
            X,
        ),
        TypeError,
        "the argument of matvec has dtype float64, expected float32",
    ),
    "event": (
        lambda: implicit_reparameterize(lambda x: x, X, event_ndims=-1),
        ValueError,
        "event_ndims must be an int of at least 0",
    ),
    "larger events": (
        lambda: implicit_reparameterize(lambda x: x, X, event_ndims=2),
        ValueError,
        "fewer dimensions than event_ndims=2",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), ERRORS.values(), ids=ERRORS)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.long
def test_second_derivatives_by_unknown_numbers_of_roots():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def root(theta):
        star = tf.sqrt(tf.stop_gradient(theta))
        return implicit_root(lambda x, theta: x**2 - theta, star, theta, batch_ndims=0)

    theta = tf.constant([4.0, 9.0], tf.float64)
    exact = derivative(derivative(tf.sqrt))
    np.testing.assert_allclose(derivative(derivative(root))(theta), exact(theta))


@WRAPS
@pytest.mark.parametrize(
    ("theta", "batch_ndims"), [(np.zeros([0]), 0), (np.zeros([0]), 1), (1.0, 1)]
)
def test_no_roots(wrap, theta, batch_ndims):
    theta = tf.constant(theta, tf.float64)

    def root(theta):
        star = tf.zeros([0], tf.float64)
        return implicit_root(lambda x, theta: x - theta, star, theta, batch_ndims=batch_ndims)

    assert root(theta).shape == [0]
    np.testing.assert_array_equal(grad(wrap(root), theta), tf.zeros_like(theta))


@pytest.mark.long
@pytest.mark.parametrize("way", ["eager", "in tf.function", "forward in tf.function"])
def test_a_jacobian_that_is_equal_for_all_mapped_members(way):
    def root(x):
        return implicit_root(lambda z, x: z - tf.sin(x), tf.sin(x), x)

    x = tf.constant([0.3, 0.7], tf.float64)
    run = FIRST_WAYS[way](lambda x: tf.vectorized_map(root, x, fallback_to_while_loop=False))
    np.testing.assert_allclose(run(x), np.cos(x), rtol=1e-12)
