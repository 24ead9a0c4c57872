"""Engines that are methods, made by a decorator with options, copied, pickled and printed."""

import copy
import pickle
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import WRAPS

X = tf.constant([[1.0, 2.0], [3.0, 4.0]], tf.float64)


class Quadratic:
    def __init__(self, scale):
        self.scale = scale

    @sgtrick.from_numpy
    def log_prob(self, x):
        return self.scale * np.sum(x**2), 2 * self.scale * x

    @sgtrick.from_numpy(event_ndims=0)
    def square(self, x):
        return self.scale * x**2, 2 * self.scale * x

    def slope(self, x):
        return 2 * self.scale * x

    def curvature(self, x, v):
        return 2 * self.scale * v

    @sgtrick.from_numpy(grad=slope, hessp=curvature)
    def apart(self, x):
        return self.scale * np.sum(x**2)


def value_and_gradient(h, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = h(x)
    return y, tape.gradient(y, x)


class TestMethods:
    @WRAPS
    @pytest.mark.parametrize("name", ["log_prob", "apart"])
    def test_of_two_objects_are_two_functions(self, name, wrap):
        one, two = Quadratic(1.0), Quadratic(5.0)
        for model in (one, two, one):
            y, g = wrap(value_and_gradient)(getattr(model, name), X)
            np.testing.assert_array_equal(y, model.scale * np.array([5, 25]))
            np.testing.assert_array_equal(g, model.scale * 2 * X)
        assert getattr(one, name).calls == 4
        assert getattr(two, name).calls == 2
        assert getattr(Quadratic, name).calls == 0

    def test_is_the_same_function_each_time(self):
        model = Quadratic(1.0)
        assert model.log_prob is model.log_prob
        assert model.log_prob is not model.square

    def test_options(self):
        model = Quadratic(3.0)
        assert model.square(X).shape == [2, 2]
        assert model.square.calls == 4

    def test_of_objects_with_slots(self):
        class Slots:
            __slots__ = ("scale",)
            log_prob = Quadratic.__dict__["log_prob"]

        model = Slots()
        model.scale = 2.0
        np.testing.assert_array_equal(model.log_prob(X), [10, 50])

    @pytest.mark.parametrize("package", ["torch", "jax"])
    def test_of_frameworks(self, package):
        pytest.importorskip(package)
        form = getattr(sgtrick, f"from_{package}")

        class Model:
            def __init__(self, scale):
                self.scale = scale

            @form
            def log_prob(self, x):
                return self.scale * (x**2).sum()

            @form(event_ndims=0)
            def square(self, x):
                return self.scale * x**2

        one, two = Model(1.0), Model(5.0)
        for model in (one, two):
            y, g = value_and_gradient(model.log_prob, X)
            np.testing.assert_array_equal(y, model.scale * np.array([5, 25]))
            np.testing.assert_array_equal(g, model.scale * 2 * X)
            np.testing.assert_array_equal(model.square(X), model.scale * X**2)
        assert (one.log_prob.calls, two.square.calls) == (1, 1)


class Picklable:
    def __init__(self, scale):
        self.scale = scale

    @sgtrick.from_numpy
    def log_prob(self, x):
        return self.scale * np.sum(x), np.full_like(x, self.scale)


class TestCopies:
    def test_deepcopy_counts_by_itself(self):
        class Engine:
            def __init__(self):
                self.scale = [2.0]

            def __call__(self, x):
                return self.scale[0] * np.sum(x), np.full_like(x, self.scale[0])

        engine = Engine()
        with futures.ThreadPoolExecutor(2) as threads:  # which cannot be copied
            h = sgtrick.from_numpy(engine, executor=threads, name="f")
            h(X)
            other = copy.deepcopy(h)
            engine.scale[0] = 7.0
            np.testing.assert_array_equal(other(X), [6, 14])
            np.testing.assert_array_equal(h(X), [21, 49])
        assert (h.calls, other.calls) == (4, 2)
        assert copy.deepcopy({"a": h, "b": h})["a"].calls == 0

    @pytest.mark.parametrize(
        "duplicate",
        [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["copy", "deepcopy", "pickle"],
    )
    def test_of_objects_with_methods(self, duplicate):
        model = Picklable(2.0)
        model.log_prob(X)
        other = duplicate(model)
        other.scale = 10.0
        np.testing.assert_array_equal(other.log_prob(X), [30, 70])
        np.testing.assert_array_equal(model.log_prob(X), [6, 14])
        assert (model.log_prob.calls, other.log_prob.calls) == (4, 2)

    def test_deepcopy_of_a_method(self):
        model = Picklable(2.0)
        other = copy.deepcopy(model.log_prob)
        model.scale = 5.0
        np.testing.assert_array_equal(other(X), [6, 14])

    def test_deepcopy_of_a_module_of_torch(self):
        torch = pytest.importorskip("torch")
        module = torch.nn.Linear(2, 1, bias=False).double()
        h = sgtrick.from_torch(lambda x: module(x).sum())
        of_module = sgtrick.from_torch(_Summed(module))
        other = copy.deepcopy(of_module)
        before = of_module(X).numpy()
        with torch.no_grad():
            module.weight *= 3
        np.testing.assert_allclose(other(X), before)
        np.testing.assert_allclose(of_module(X), 3 * before)
        np.testing.assert_allclose(h(X), 3 * before)


class _Summed:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x).sum()


class TestRepr:
    def test_names_function_options_and_counts(self):
        def flaky(x):
            if x[0] > 1:
                raise ArithmeticError
            return np.nan, x

        h = sgtrick.from_numpy(flaky, on_error=-np.inf, event_ndims=1)
        assert repr(h).startswith(
            "<host engine flaky, on_error=-inf: calls 0, vjp_calls 0, jvp_calls 0, hess_calls 0, failures 0"
        )
        h(X)
        assert (
            ": calls 2, vjp_calls 0, jvp_calls 0, hess_calls 0, failures 1, nonfinite 1, s"
            in repr(h)
        )
        h = sgtrick.from_numpy(
            lambda x: x, grad=lambda x: x, hess=lambda x: x, event_ndims=(0, np.int64(1)), name="g"
        )
        assert repr(h).startswith("<host engine g, event_ndims=(0, ")
        assert ", name='g', grad, hess: " in repr(h)

    def test_of_a_method(self):
        assert repr(Quadratic(1.0).log_prob).startswith("<host engine log_prob: ")
