"""Engines that are methods, made by a decorator with options, copied, pickled and printed."""

import copy
import pickle
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import WRAPS, value_and_gradients

X = tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64)
SQUARES = np.array([5.0, 25.0])


class Model:
    def __init__(self, scale):
        self.scale = scale


class OfNumPy(Model):
    @sgtrick.from_numpy
    def log_prob(self, x):
        return self.scale * np.sum(x**2), 2 * self.scale * x

    @sgtrick.from_numpy(event_ndims=0)
    def square(self, x):
        return self.scale * x**2, 2 * self.scale * x


class Apart(Model):
    """Whose gradient is a method, too."""

    def slope(self, x):
        return 2 * self.scale * x

    def curvature(self, x, v):
        return 2 * self.scale * v

    @sgtrick.from_numpy(grad=slope, hessp=curvature)
    def log_prob(self, x):
        return self.scale * np.sum(x**2)

    @sgtrick.from_numpy(grad=slope, event_ndims=0)
    def square(self, x):
        return self.scale * x**2


def of_a_framework(package):
    pytest.importorskip(package)
    form = getattr(sgtrick, f"from_{package}")

    class OfFramework(Model):
        @form(vmap=False)
        def log_prob(self, x):
            return self.scale * (x**2).sum()

        @form(vmap=False, event_ndims=0)
        def square(self, x):
            return self.scale * x**2

    return OfFramework


class TestMethods:
    @WRAPS
    @pytest.mark.parametrize(
        "model",
        [lambda: OfNumPy, lambda: Apart, lambda: of_a_framework("torch"),
         lambda: of_a_framework("jax")],
        ids=["with the value", "apart", "torch", "jax"],
    )  # fmt: skip
    def test_of_two_objects_are_two_functions(self, model, wrap):
        model = model()
        one, two = model(1.0), model(5.0)
        for m in (one, two, one):
            y, (g,) = wrap(value_and_gradients)(m.log_prob, X)
            np.testing.assert_array_equal(y, m.scale * SQUARES)
            np.testing.assert_array_equal(g, m.scale * 2 * X)
            np.testing.assert_array_equal(m.square(X), m.scale * X**2)
        assert (one.log_prob.calls, two.log_prob.calls, two.square.calls) == (4, 2, 4)
        assert model.log_prob.calls == 0

    def test_is_the_same_function_each_time(self):
        model = OfNumPy(1.0)
        assert model.log_prob is model.log_prob
        assert model.log_prob is not model.square

    def test_of_objects_with_slots(self):
        class Slots:
            __slots__ = ("scale",)
            log_prob = OfNumPy.__dict__["log_prob"]

        model = Slots()
        model.scale = 2.0
        np.testing.assert_array_equal(model.log_prob(X), 2 * SQUARES)


class Engine(Model):
    def __call__(self, x):
        return self.scale * np.sum(x**2), 2 * self.scale * x


class TestCopies:
    @pytest.mark.parametrize(
        "duplicate",
        [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["copy", "deepcopy", "pickle"],
    )
    def test_of_objects_with_methods(self, duplicate):
        model = OfNumPy(2.0)
        model.log_prob(X)
        other = duplicate(model)
        other.scale = 10.0
        np.testing.assert_array_equal(other.log_prob(X), 10 * SQUARES)
        np.testing.assert_array_equal(model.log_prob(X), 2 * SQUARES)
        assert (model.log_prob.calls, other.log_prob.calls) == (4, 2)

    @pytest.mark.parametrize("what", ["callable", "method"])
    def test_deepcopy_has_its_own_state_and_counts(self, what):
        with futures.ThreadPoolExecutor(2) as threads:  # which cannot be copied
            if what == "callable":
                engine = Engine(2.0)
                h = sgtrick.from_numpy(engine, executor=threads, name="f")
            else:
                engine = OfNumPy(2.0)
                h = engine.log_prob
            h(X)
            other = copy.deepcopy(h)
            engine.scale = 7.0
            np.testing.assert_array_equal(other(X), 2 * SQUARES)
            np.testing.assert_array_equal(h(X), 7 * SQUARES)
        assert (h.calls, other.calls) == (4, 2)
        assert copy.deepcopy({"a": h, "b": h})["a"].calls == 0

    def test_deepcopy_of_a_module_of_torch(self):
        torch = pytest.importorskip("torch")
        module = torch.nn.Linear(2, 1, bias=False).double()
        closes_over = sgtrick.from_torch(lambda x: module(x).sum())
        of_module = sgtrick.from_torch(Summed(module))
        other = copy.deepcopy(of_module)
        before = of_module(X).numpy()
        with torch.no_grad():
            module.weight *= 3
        np.testing.assert_allclose(other(X), before)
        np.testing.assert_allclose(of_module(X), 3 * before)
        np.testing.assert_allclose(closes_over(X), 3 * before)


class Summed:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x).sum()


def test_repr_names_function_options_and_counts():
    def flaky(x):
        if x[0] > 1:
            raise ArithmeticError
        return np.nan, x

    h = sgtrick.from_numpy(flaky, on_error=-np.inf, event_ndims=1)
    h(X)
    assert repr(h).startswith(
        "<host engine flaky, on_error=-inf: calls 2, vjp_calls 0, jvp_calls 0, hess_calls 0, "
        "failures 1, nonfinite 1, s"
    )
    h = sgtrick.from_numpy(
        lambda x: x, grad=lambda x: x, hess=lambda x: x, event_ndims=(0, np.int64(1)), name="g"
    )
    assert repr(h).startswith("<host engine g, event_ndims=(0, ")
    assert ", name='g', grad, hess: " in repr(h)
    assert repr(OfNumPy(1.0).log_prob).startswith("<host engine log_prob: ")
