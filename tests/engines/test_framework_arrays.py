"""Functions of PyTorch and JAX whose values are arrays and structures of arrays."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from array_model import (
    WAYS,
    W,
    X,
    added,
    by_forward_mode,
    found_in,
    gradients,
    of_a_likelihood,
    reverse_over_forward,
    reverse_over_reverse,
    true,
    true_pair,
)
from shared import forward_derivative


class Torch:
    form = staticmethod(sgtrick.from_torch)
    shapes = ({"value_shape": (3,)}, {"value_shape": {"curve": (None,), "size": ()}})

    def __init__(self):
        self.np = pytest.importorskip("torch")
        self.w = self.np.tensor(W)


class Jax:
    form = staticmethod(sgtrick.from_jax)
    shapes = ({}, {})  # it finds them

    def __init__(self):
        self.np = pytest.importorskip("jax.numpy")
        self.w = W


@pytest.fixture(params=[Torch, Jax], ids=["torch", "jax"], scope="module")
def framework(request):
    return request.param()


def array(framework, **options):
    def curve(x, a):
        return a * framework.np.sin(framework.w @ x)

    return framework.form(curve, event_ndims=(1, 0), **framework.shapes[0], **options)


def structure(framework, **options):
    def curve_and_size(x, a):
        return {"size": a * (x**2).sum(), "curve": a * framework.np.sin(framework.w @ x)}

    h = framework.form(curve_and_size, event_ndims=(1, 0), **framework.shapes[1], **options)
    return added(h)


MODELS = {array: true, structure: added(true_pair)}
SECOND = [reverse_over_reverse, reverse_over_forward, of_a_likelihood]
CASES = [
    *itertools.product([gradients, by_forward_mode, *SECOND], ["eager", "in tf.function"]),
    (gradients, "around vectorized_map"),  # the others as for from_numpy
]


@pytest.mark.parametrize(("law", "way"), CASES)
@pytest.mark.parametrize("model", MODELS)
def test_equals_autodiff(framework, model, law, way):
    h = model(framework)
    for came, expected in zip(found_in(WAYS[way], law, h), law(MODELS[model]), strict=True):
        np.testing.assert_allclose(came, expected, rtol=1e-9, atol=1e-12)


def test_static_and_unknown_shapes(framework):
    """Of what is unknown in the arguments, the value is known as far as possible."""

    def outer(x, y):
        return x[:, None] * y, (x**2).sum()

    stated = {} if isinstance(framework, Jax) else {"value_shape": ((None, 3), ())}
    h = framework.form(outer, **stated)
    specs = [tf.TensorSpec([5, None]), tf.TensorSpec([5, 3])]
    f = tf.function(lambda x, y: gradients(h, (x, y), None)).get_concrete_function(*specs)
    (product, square), by_x, _ = f.structured_outputs
    assert (product.shape.as_list(), square.shape.as_list()) == ([5, None, 3], [5])
    assert by_x.shape.as_list() == [5, None]
    x, y = np.ones([5, 4], np.float32), np.ones([5, 3], np.float32)
    (product, square), by_x, by_y = f(tf.constant(x), tf.constant(y))
    np.testing.assert_array_equal(product, np.ones([5, 4, 3]))
    np.testing.assert_array_equal(square, np.full(5, 4.0))
    np.testing.assert_array_equal(by_x, np.full([5, 4], 5.0))
    np.testing.assert_array_equal(by_y, np.full([5, 3], 4.0))


def test_values_without_derivatives_raise(framework):
    h = framework.form(lambda x: x > 0, value_shape=(2,), name="f")
    with pytest.raises(
        TypeError, match=r"f must return a value with derivatives, got .*bool: cast"
    ):
        h(tf.constant([1.0, 2.0]))


def test_cut_off_values_raise():
    torch = pytest.importorskip("torch")
    h = sgtrick.from_torch(lambda x: torch.sin(x.detach()), value_shape=(2,), name="f")
    x, message = tf.constant([1.0, 2.0]), "f returns a value that is cut off"
    with pytest.raises(TypeError, match=message):
        gradients(h, (x,), None)
    with pytest.raises((TypeError, tf.errors.OpError), match=message):
        forward_derivative(h)(x)


def test_outputs_of_jax_that_are_numbers():
    jnp = pytest.importorskip("jax.numpy")
    h = sgtrick.from_jax(lambda x: {"a": jnp.sin(x), "c": 1.0})
    x = tf.constant(X)
    y, by_x = gradients(lambda x: h(x)["a"] + h(x)["c"][:, tf.newaxis], (x,), None)
    np.testing.assert_allclose(y, np.sin(X) + 1)
    np.testing.assert_allclose(by_x, np.cos(X))


def test_unknown_dimensions_of_which_not_all_sizes_will_do():
    pytest.importorskip("jax")
    h = sgtrick.from_jax(lambda x: -x @ np.eye(4) @ x)
    f = tf.function(h, input_signature=[tf.TensorSpec([None, None], tf.float64)])
    np.testing.assert_allclose(f(np.ones([2, 4])), [-4.0, -4.0])


def test_a_number_cannot_fill_a_value_of_unknown_shape():
    pytest.importorskip("jax")
    h = sgtrick.from_jax(lambda x: x**2, on_error=-1.0)
    np.testing.assert_array_equal(h(tf.ones([2, 3])), np.ones([2, 3]))
    f = tf.function(h, input_signature=[tf.TensorSpec([None, None])])
    with pytest.raises(ValueError, match="its shape must be known"):
        f(tf.ones([2, 3]))


@pytest.mark.parametrize(
    "part", ["fft.rfft(x).real", "stack([x[::3], x[::3]])", "reshape(x, [-1, 3])"]
)
def test_dimensions_that_depend_on_unknown_ones(part):
    jnp = pytest.importorskip("jax.numpy")
    expected = eval(f"np.{part}", {"np": np, "x": np.ones(6)})
    h = sgtrick.from_jax(lambda x: eval(f"np.{part}", {"np": jnp, "x": x}))
    f = tf.function(h, input_signature=[tf.TensorSpec([None, None], tf.float64)])
    np.testing.assert_allclose(f(np.ones([2, 6])), [expected, expected], atol=1e-12)
