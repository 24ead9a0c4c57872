"""JAX functions as operations of the graph, beside the same functions in TensorFlow."""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import sgtrick
from array_model import (
    WAYS,
    A,
    W,
    X,
    added,
    by_forward_mode,
    forward_over_reverse,
    found_in,
    gradients,
    joint,
    of_a_likelihood,
    reverse_over_forward,
    reverse_over_reverse,
    true,
    true_pair,
)
from matrix import spread, traced
from shared import WRAPS, Way, compiled, derivative, forward_derivative, mapped

pytest.importorskip("jax.experimental.jax2tf", reason="JAX is not installed")
import jax
import jax.numpy as jnp


def native(fn, **options):
    return sgtrick.from_jax(fn, native=True, **options)


ARRAY = native(lambda x, a: a * jnp.sin(W @ x), event_ndims=(1, 0))
PAIR = native(
    lambda x, a: {"size": a * (x**2).sum(), "curve": a * jnp.sin(W @ x)}, event_ndims=(1, 0)
)
MODELS = {"array": (ARRAY, true), "structure": (added(PAIR), added(true_pair))}


def third(f):
    x, a = tf.constant(X), tf.constant(A)
    with tf.GradientTape() as tape:
        tape.watch([x, a])
        with tf.GradientTape() as inner:
            inner.watch([x, a])
            by_x, _ = gradients(f, (x, a))[1:]
        second = inner.gradient(by_x, [x, a])
    return tape.gradient(second, [x, a])


LAWS = [
    *(gradients, by_forward_mode, reverse_over_reverse, forward_over_reverse),
    *(reverse_over_forward, of_a_likelihood, third),
]
WAYS = WAYS | {
    "in XLA": Way(around=compiled),
    "around XLA": Way(inside=compiled),
    "vectorized_map in tf.function": Way(inside=mapped, around=traced),
    "vectorized_map in XLA": Way(inside=mapped, around=compiled),
}
# TensorFlow fails for its own operations, or has None.
OF_TENSORFLOW = {
    (reverse_over_forward, "around tf.function"),
    (reverse_over_forward, "around XLA"),
    (reverse_over_forward, "around vectorized_map"),
    (reverse_over_forward, "vectorized_map in XLA"),
    (forward_over_reverse, "around vectorized_map"),
}


CASES = spread(MODELS, LAWS, WAYS, valid=lambda _, *case: case not in OF_TENSORFLOW)


@pytest.mark.parametrize(("model", "law", "way"), CASES)
def test_equals_autodiff(model, law, way):
    h, oracle = MODELS[model]
    for came, expected in zip(found_in(WAYS[way], law, h), law(oracle), strict=True):
        np.testing.assert_allclose(came, expected, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def takes_unknown_dimensions():
    """Skips where JAX writes what this TensorFlow cannot read."""
    f = tf.function(native(lambda x: x * 2), input_signature=[tf.TensorSpec([None, 2])])
    try:
        f(tf.ones([1, 2]))
    except tf.errors.InvalidArgumentError as error:
        assert "failed to deserialize" in str(error)  # noqa: PT017
        pytest.skip(f"JAX {jax.__version__} is too new for TensorFlow {tf.__version__}")


class TestShapes:
    @WRAPS
    @pytest.mark.parametrize("batch", [(), (1,), (4,), (2, 3), (0,), (2, 0)])
    def test_batches(self, batch, wrap):
        """Of one argument; the other is shared by all members."""
        x = tf.constant(np.random.default_rng(0).normal(size=(*batch, 2)))
        a = tf.constant(2.0, tf.float64)

        def run(f):
            with tf.GradientTape() as tape:
                tape.watch([x, a])
                y = f(x, a)
            return y, *tape.gradient(y, [x, a])

        for came, expected in zip(wrap(run)(ARRAY), run(true), strict=True):
            np.testing.assert_allclose(came, expected, rtol=1e-12)

    @pytest.mark.parametrize("size", [3, 1, 0])
    @pytest.mark.parametrize("unknown", [[None, 2], [None, None]])
    @pytest.mark.usefixtures("takes_unknown_dimensions")
    def test_unknown_dimensions(self, unknown, size):
        """First traced for unknown ones, and then for known ones."""
        h, oracle = ARRAY, true
        if unknown == [None, None]:
            h = native(lambda x, a: a * x * jnp.sin(x).sum(), event_ndims=(1, 0))
            oracle = lambda x, a: a[:, None] * x * tf.reduce_sum(tf.sin(x), -1, keepdims=True)  # noqa: E731

        def run(f, x, a):
            by_x = derivative(lambda x: f(x, a))
            forward = forward_derivative(lambda x: f(x, a))
            return f(x, a), by_x(x), forward(x), derivative(by_x)(x), forward_derivative(by_x)(x)

        x, a = tf.constant(X[:size]), tf.constant(A[:size])
        for signature in ([tf.TensorSpec(s, tf.float64) for s in (unknown, [None])], None):
            f = tf.function(functools.partial(run, h), input_signature=signature)
            for came, expected in zip(f(x, a), run(oracle, x, a), strict=True):
                np.testing.assert_allclose(came, expected, rtol=1e-12)

    @pytest.mark.usefixtures("takes_unknown_dimensions")
    def test_an_empty_batch_says_nothing_about_what_is_shared(self):
        """Though the function is infinite at what stands in for its members."""
        h, w = native(lambda x, w: jnp.log(x @ w)), tf.constant([1.0, 2.0])
        f = tf.function(lambda x: derivative(lambda w: h(x, w))(w))
        for spec in (tf.TensorSpec([None, 2]), tf.TensorSpec([0, 2])):
            came = f.get_concrete_function(spec)(tf.zeros([0, 2]))
            np.testing.assert_array_equal(came, [0.0, 0.0])

    @pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
    @pytest.mark.usefixtures("takes_unknown_dimensions")
    def test_several_unknown_batch_dimensions(self, shape):
        specs = [tf.TensorSpec([None, None, *event], tf.float64) for event in ([2], [])]
        f = tf.function(lambda x, a: gradients(ARRAY, (x, a), None), input_signature=specs)
        args = [tf.ones([*shape, *event], tf.float64) for event in ([2], [])]
        for came, expected in zip(f(*args), gradients(true, args, None), strict=True):
            np.testing.assert_allclose(came, expected, rtol=1e-12)

    def test_static_shapes(self):
        specs = [tf.TensorSpec([None, 7, 2]), tf.TensorSpec([7])]
        (y,) = tf.function(ARRAY).get_concrete_function(*specs).outputs
        assert (y.shape.as_list(), y.dtype) == ([None, 7, 3], tf.float32)

    def test_unknown_ranks_raise(self):
        with pytest.raises(ValueError, match="x has an unknown rank"):
            tf.function(ARRAY, input_signature=[tf.TensorSpec(None), tf.TensorSpec([])])(X, 1.0)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtypes_whatever_the_mode_of_jax(dtype, x64):
    seen = []

    def f(x, k):
        if k.dtype.kind == "i":
            seen.append((x.dtype.name, k.dtype.name))
        return jnp.sin(x).sum() * k

    enable = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
    with enable(x64):
        h = native(f, dtype=dtype, event_ndims=(1, 0))
        for of in (tf.float32, tf.float64):
            x = tf.constant(X, of)
            y, by_x = gradients(lambda x: h(x, tf.constant(3, tf.int64)), (x,), None)
            assert (y.dtype, by_x.dtype) == (of, of)
            np.testing.assert_allclose(y, 3 * np.sin(X).sum(-1), rtol=1e-6)
            np.testing.assert_allclose(by_x, 3 * np.cos(X), rtol=1e-6)
            _, _, by_k = gradients(h, (x[0], tf.constant(3, of)), None)  # the same, now a float
            np.testing.assert_allclose(by_k, np.sin(X[0]).sum(), rtol=1e-6)
    assert set(seen) == {(dtype, "int64")}


def test_structures_keywords_and_defaults():
    h = native(lambda p, n: p["a"] ** n * p["b"], event_ndims=({"a": 1, "b": 0}, 0))
    p = {"a": tf.constant(X), "b": tf.constant(A)}
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(p)
        y = h(p, n=tf.constant(2))
    np.testing.assert_allclose(y, X**2 * A[:, None], rtol=1e-12)
    by = tape.gradient(y, p)
    np.testing.assert_allclose(by["a"], 2 * X * A[:, None], rtol=1e-12)
    h = native(lambda x, scale=2.0, *, k=1: (scale * x**k).sum())
    np.testing.assert_allclose(h(X), 2 * X.sum(-1), rtol=1e-12)
    with pytest.raises(TypeError, match=r"keyword-only arguments \['k'\]"):
        h(X, k=2)


class TestStructureByShape:
    """A value whose structure depends on the shapes and dtypes of the arguments."""

    FUNCTIONS = {
        "entries": lambda x, n: [n * v**2 for v in x],
        "name": lambda x, n: {"odd" if x.shape[0] % 2 else "even": n * (x**2).sum()},
        "dtype": lambda x, n: {str(n.dtype): n * (x**2).sum(), "all": 0 * (x**2).sum()},
    }

    @pytest.mark.parametrize("way", ["eager", "in tf.function", "in XLA"])
    @pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
    def test_known(self, f, way):
        h = native(f, event_ndims=(1, 0))

        def law(x, n):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = h(x, n)
            return y, tape.gradient(y, x)

        cases = [(2, np.int64), (3, np.int64), (2, np.int32), (1, np.int32), (3, np.int64)]
        for size, dtype in cases:
            x, n = np.linspace(1, 2, size), np.array(3, dtype)
            y, by_x = found_in(
                WAYS[way], lambda h, x=x, n=n: h(tf.constant(x), tf.constant(n)), law
            )
            tf.nest.map_structure(np.testing.assert_allclose, y, f(x, n))
            np.testing.assert_allclose(by_x, 6 * x)

    @pytest.mark.usefixtures("takes_unknown_dimensions")
    def test_unknown(self):
        """JAX takes an unknown dimension for unequal to all numbers."""
        h = native(lambda x: self.FUNCTIONS["name"](x, np.array(3)))
        spec = tf.TensorSpec([None], tf.float64)
        graph = tf.function(h, input_signature=[spec], autograph=False)
        with pytest.raises(TypeError, match=r"\{'odd': .* depends on a dimension that is unknown"):
            graph(np.ones(3))


class TestMapped:
    @pytest.mark.usefixtures("takes_unknown_dimensions")
    def test_nested_and_over_unknown_lengths(self):
        f = lambda x, a: tf.vectorized_map(  # noqa: E731
            lambda row: tf.vectorized_map(lambda x: ARRAY(x, a), row), x
        )
        x = np.random.default_rng(1).normal(size=(2, 3, 2))
        spec = [tf.TensorSpec([None, None, 2], tf.float64), tf.TensorSpec([], tf.float64)]
        run = tf.function(
            lambda x, a: list(map(tf.convert_to_tensor, gradients(f, (x, a), None))),
            input_signature=spec,
        )
        for came, expected in zip(
            run(x, 2.0), gradients(true, (x, np.float64(2.0)), None), strict=True
        ):
            np.testing.assert_allclose(came, expected, rtol=1e-12)

    def test_in_a_loop(self):
        def loop(f):
            return tf.while_loop(
                lambda i, _: i < 3,
                lambda i, x: (i + 1, x + tf.reduce_sum(f(x, tf.constant(A)), -1, True) / 10),
                (0, tf.constant(X)),
            )[1]

        for way in (traced, compiled):
            np.testing.assert_allclose(way(lambda: loop(mapped(ARRAY)))(), loop(true))

        def slope(f):
            return derivative(lambda a: tf.reduce_sum(f(tf.constant(X), a)))(tf.constant(A))

        np.testing.assert_allclose(traced(lambda: slope(mapped(ARRAY)))(), slope(true))


@pytest.mark.parametrize("run", [traced, compiled])
def test_nuts_in_an_autobatched_joint_distribution(run):
    def draws(f):
        target = joint(f).experimental_pin(y=[0.3, -0.2, 0.5]).unnormalized_log_prob
        nuts = tfp.mcmc.NoUTurnSampler(target, tf.constant(0.3, tf.float64), max_tree_depth=3)
        return run(tfp.mcmc.sample_chain)(
            10, [tf.constant(X), tf.constant(A)], kernel=nuts, trace_fn=None, seed=[1, 2]
        )

    for came, expected in zip(draws(ARRAY), draws(true), strict=True):
        np.testing.assert_allclose(came, expected, rtol=1e-7)


@pytest.mark.usefixtures("takes_unknown_dimensions")
class TestStored:
    LOADS = """
import json, sys
sys.modules["jax"] = sys.modules["sgtrick"] = None  # importing them raises
import tensorflow as tf
x = tf.constant(json.loads(sys.argv[1]), tf.float64)
loaded = tf.saved_model.load(sys.argv[2])
with tf.GradientTape() as tape:
    tape.watch(x)
    y = loaded.f(x)
print(json.dumps([y.numpy().tolist(), tape.gradient(y, x).numpy().tolist()]))
"""

    @staticmethod
    def store(folder, custom_gradients=True):
        module = tf.Module()
        f = lambda x: ARRAY(x, tf.constant(2.0, tf.float64))  # noqa: E731
        module.f = tf.function(f, input_signature=[tf.TensorSpec([None, 2], tf.float64)])
        options = tf.saved_model.SaveOptions(experimental_custom_gradients=custom_gradients)
        tf.saved_model.save(module, str(folder), options=options)
        return str(folder)

    def test_in_a_process_without_jax_and_sgtrick(self, tmp_path):
        command = [sys.executable, "-c", self.LOADS, json.dumps(X.tolist()), self.store(tmp_path)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        y, by_x = json.loads(printed.splitlines()[-1])
        a = np.float64(2.0)
        expected = gradients(true, (X, a), None)
        np.testing.assert_allclose(y, expected[0], rtol=1e-12)
        np.testing.assert_allclose(by_x, expected[1], rtol=1e-12)

    def test_mapping_what_was_loaded_raises(self, tmp_path):
        """TensorFlow's own error, which names the operation that it cannot map."""
        loaded = tf.saved_model.load(self.store(tmp_path))
        f = lambda x: tf.vectorized_map(lambda x: loaded.f(x[tf.newaxis])[0], x)  # noqa: E731
        with pytest.raises(AssertionError, match=r"Map_a_loaded_model_by_tf\.map_fn"):
            f(tf.constant(X))
        one_by_one = tf.map_fn(lambda x: loaded.f(x[tf.newaxis])[0], tf.constant(X))
        np.testing.assert_allclose(one_by_one, true(X, np.float64(2.0)), rtol=1e-12)

    def test_without_custom_gradients_a_derivative_raises(self, tmp_path):
        loaded = tf.saved_model.load(self.store(tmp_path, custom_gradients=False))
        with pytest.raises(LookupError, match="experimental_custom_gradients"):
            derivative(loaded.f)(tf.constant(X))


class TestErrors:
    @pytest.mark.parametrize(("option", "value"), [("on_error", -np.inf), ("value_shape", (2,))])
    def test_options_of_the_host(self, option, value):
        with pytest.raises(TypeError, match=rf"from_jax\(native=True\) has no {option}: the func"):
            native(jnp.sum, **{option: value})

    def test_jax_without_jax2tf(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "sgtrick._host.native", raising=False)
        monkeypatch.setitem(sys.modules, "jax.experimental.jax2tf", None)
        monkeypatch.delattr(jax.experimental, "jax2tf", raising=False)
        with pytest.raises(ImportError, match=r"needs jax.experimental.jax2tf, which JAX .* lacks"):
            native(jnp.sum)

    @pytest.mark.parametrize(
        ("fn", "event_ndims", "args", "error", "message"),
        [
            (lambda x: x > 0, 1, [X], TypeError, "must return a value with derivatives, got bool"),
            (lambda n: n * 1.0, 0, [3], TypeError, "has no argument of a floating dtype"),
            (lambda x, a: a, (1,), [X, A], ValueError, r"one entry for each of the 2 arguments"),
            (lambda x, s: x, (1, 0), [X, tf.constant("a")], TypeError, "s is a string"),
        ],
    )
    def test_what_it_cannot_take(self, fn, event_ndims, args, error, message):
        with pytest.raises(error, match=message):
            native(fn, event_ndims=event_ndims)(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("jit_compile", [None, True])
def test_on_a_gpu(jit_compile):
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("no GPU is visible")
    with tf.device("GPU:0"):
        run = tf.function(lambda: gradients(ARRAY), jit_compile=jit_compile)
        for came, expected in zip(run(), gradients(true), strict=True):
            assert "GPU" in came.device
            np.testing.assert_allclose(came, expected, rtol=1e-9)
