"""What messages of engines advise: it has to help."""

import re
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import engine_functions as engines
import sgtrick
from array_model import RAISED
from shared import EXECUTED, WRAPS, derivative, forward_derivative, pushed

X = tf.constant([0.5, 2.0], tf.float64)


def cubes(**options):
    return sgtrick.from_numpy(
        lambda x: x**3, vjp=lambda x, u: 3 * x**2 * u, value_shape=(2,), name="f", **options
    )


JVP = {"jvp": lambda x, t: 3 * x**2 * t}
HESSP = {"hessp": lambda x, u, v: 6 * x * u * v}


def by_upstream(f):
    """Forward mode by reverse mode twice, as `fwd_gradients` of libraries have it."""

    def pulled(u):
        return derivative(lambda x: tf.reduce_sum(u * f(x)))(X)

    return derivative(pulled)(tf.ones_like(X))


def by_weights(f):
    """A loss of forces, by a factor of the energy."""

    def loss(w):
        return tf.reduce_sum(derivative(lambda x: tf.reduce_sum(w * f(x)))(X) ** 2)

    return derivative(loss)(tf.constant(2.0, tf.float64))


def by_the_point(f):
    return derivative(derivative(lambda x: tf.reduce_sum(f(x) ** 2)))(X)


class TestSecondDerivatives:
    @pytest.mark.parametrize(
        ("law", "needed"), [(by_upstream, JVP), (by_weights, JVP), (by_the_point, JVP | HESSP)]
    )
    @WRAPS
    def test_of_an_engine_with_a_vjp_alone(self, law, needed, wrap, recwarn):
        message = r"asked for a second derivative.* by an upstream gradient.*jvp=.*point, hessp="
        try:
            came = wrap(lambda: law(cubes()))()
        except RAISED as error:
            told = str(error)
        else:
            assert np.isnan(came).all()
            told = "".join(str(w.message) for w in recwarn if w.category is RuntimeWarning)
        assert re.search(message, told, re.IGNORECASE | re.DOTALL)
        came = wrap(lambda: law(cubes(**needed)))()
        np.testing.assert_allclose(came, law(lambda x: x**3))

    @WRAPS
    def test_with_a_hessian(self, wrap, recwarn):
        try:
            assert np.isnan(wrap(lambda: by_weights(cubes(**HESSP)))())
        except RAISED as error:
            told = str(error)
        else:
            told = str(recwarn.pop(RuntimeWarning).message)
        assert "has no jvp=. Pass jvp=" in told


def square_root(finder):
    return lambda a: sgtrick.implicit_root(lambda r, a: r**2 - a, finder(a), a)


def embedded_square(finder):
    return lambda a: sgtrick.custom_gradient(finder(a), 0.5 / tf.sqrt(a), a)


@pytest.mark.parametrize("form", [square_root, embedded_square])
@WRAPS
def test_forward_mode_of_what_is_stopped(form, wrap):
    finder = sgtrick.from_numpy(np.sqrt, grad=False, event_ndims=0)
    with pytest.raises(NotImplementedError, match=r"or tf\.stop_gradient of the arguments, if"):
        wrap(forward_derivative(form(finder)))(X)
    stopped = form(lambda a: finder(tf.stop_gradient(a)))
    np.testing.assert_allclose(wrap(forward_derivative(stopped))(X), 0.5 / np.sqrt(X))


@pytest.mark.parametrize(
    ("ufunc", "slope"), [(np.sqrt, lambda x: 0.5 / tf.sqrt(x)), (np.exp, tf.exp)]
)
def test_gradients_of_ufuncs(ufunc, slope):
    h = sgtrick.with_gradient(sgtrick.from_numpy(ufunc, grad=False, event_ndims=0), slope)
    np.testing.assert_allclose(h(X), ufunc(X))
    np.testing.assert_allclose(derivative(h)(X), slope(X))
    np.testing.assert_allclose(pushed(h, X, X), slope(X) * X)


@pytest.mark.parametrize("kind", ["none yet", "another"])
def test_processes_find_no_function_under_a_decorator(kind, monkeypatch):
    def decorated(x):
        raise AssertionError

    decorated.__qualname__ = "decorated"
    decorated.__module__ = engines.__name__
    if kind == "another":
        monkeypatch.setattr(engines, "decorated", engines.normal, raising=False)
    message = r"cannot be sent: .*without the decorator.* = from_numpy\(decorated, executor="
    with futures.ProcessPoolExecutor(1) as processes, pytest.raises(TypeError, match=message):
        sgtrick.from_numpy(decorated, executor=processes)


@pytest.mark.parametrize("text", ["fast", b"fast", tf.constant("fast"), np.array(["fast"])])
@pytest.mark.parametrize("package", ["jax", "torch"])
def test_text_for_a_framework(package, text):
    pytest.importorskip(package)
    form = getattr(sgtrick, f"from_{package}")
    h = form(lambda x, s: x.sum(), event_ndims=(1, 0), on_error=0.0, name="f")
    if package == "torch" and isinstance(text, (str, bytes)):
        np.testing.assert_array_equal(h(X, text), 2.5)
        return
    with pytest.raises(TypeError, match=r"^f has an argument that is text, which .* does not take"):
        h(X, text)


class StopError(BaseException):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")
        self.code, self.why = code, why


@pytest.mark.parametrize("wrap", EXECUTED.values(), ids=EXECUTED)
def test_exceptions_that_need_arguments(wrap):
    def stops(x):
        raise StopError(3, why="a signal")

    executor = sgtrick.MainThreadExecutor()
    h = wrap(sgtrick.from_numpy(stops, grad=False, executor=executor))
    with pytest.raises(StopError, match="3: a signal") as raised:
        executor.run(lambda: h(X))
    assert (raised.value.code, raised.value.why) == (3, "a signal")


@pytest.mark.parametrize("dtype", ["float32", np.float32, tf.float32, np.dtype("float32")])
def test_repr_has_the_dtype(dtype):
    shown = repr(sgtrick.from_numpy(engines.normal, dtype=dtype))
    assert shown.startswith("<host engine normal, dtype='float32': calls 0")
    assert "dtype" not in repr(sgtrick.from_numpy(engines.normal, dtype=np.float64))
