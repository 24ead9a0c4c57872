"""`torch.compile` of both forms as one graph, and what it refuses."""

import functools

import numpy as np
import pytest
from keras import ops
from transformations import BACKEND, tensor

from sgtrick.keras import custom_gradient, custom_vjp

if BACKEND != "torch":
    pytest.skip("of torch alone", allow_module_level=True)

import torch

POINTS = np.random.default_rng(5).normal(size=(4, 3))
WEIGHT = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


def truth(x):
    return ops.sum(x**4, -1)


def value(x):
    return custom_gradient(truth(x), 4 * x**3, x)


def structure(x):
    kept = x.detach()

    def hx(v):
        return {"a": [12 * kept**2 * v["a"][0]]}

    return custom_gradient(truth(x), {"a": [4 * x**3]}, {"a": [x]}, hx=hx)


@custom_vjp
def rule(x):
    return truth(x).detach(), lambda u: 4 * x**3 * u[..., None]


@custom_vjp
def rule_of_keras(x):
    def grad(*args, upstream):
        return 4 * args[0] ** 3 * upstream[..., None]

    return truth(x).detach(), grad


@custom_vjp
def rule_with_a_partial(x):
    return truth(x).detach(), functools.partial(lambda x, u: 4 * x**3 * u[..., None], x)


@custom_vjp
def nested(point):
    x, y = point["x"], point["y"][0]
    values = {"of x": truth(x).detach(), "of y": truth(y).detach()}
    return values, lambda u, v: {"x": 4 * x**3 * u[..., None], "y": [4 * y**3 * v[..., None]]}


def structured_rule(x):
    out = nested({"x": x, "y": [0 * x]})
    return out["of x"] + out["of y"]


@custom_vjp
def with_default(dims, x, power=4):
    value = truth(x).detach() * dims[0]
    return value, lambda u: (None, dims[0] * power * x ** (power - 1) * u[..., None], None)


class Scale:
    factor = 1.0

    @custom_vjp
    def method(self, x):
        return self.factor * truth(x).detach(), lambda u: self.factor * 4 * x**3 * u[..., None]


class Other:
    factor = 1.0

    @custom_vjp
    def times(*args):
        this, x = args
        return this.factor * truth(x).detach(), lambda u: this.factor * 4 * x**3 * u[..., None]

    method = times


FORMS = {
    "value": value,
    "structure": structure,
    "rule": rule,
    "rule of Keras": rule_of_keras,
    "rule with a partial": rule_with_a_partial,
    "structured rule": structured_rule,
    "default": lambda x: with_default((1, 2), x),
    "method": Scale().method,
    "method without self": Other().method,
}


def compiled(f, fullgraph=True):
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=fullgraph, backend="aot_eager")  # needs no C++ compiler


def point():
    return tensor(POINTS).requires_grad_()


@pytest.mark.parametrize("form", FORMS)
def test_one_graph_with_the_gradient(form):
    x, u = point(), tensor([1.0, 0.0, -2.0, 3.0])
    (expected,) = torch.autograd.grad(truth(x), x, u)
    y = compiled(FORMS[form])(x)
    (came,) = torch.autograd.grad(y, x, u)
    torch.testing.assert_close(y, truth(x))
    torch.testing.assert_close(came, expected)


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_are_refused_beside_native_terms(form):
    x = point()
    y = ops.sum(compiled(FORMS[form])(x)) + ops.sum(x**3)
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(ops.sum(first), x)


@pytest.mark.parametrize("form", ["value", "rule"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, torch.func.vmap])
def test_transformations_inside_are_refused(form, transform):
    f = FORMS[form] if transform is torch.func.vmap else lambda x: ops.sum(FORMS[form](x))
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"inside transformations of torch\.func"
    ):
        compiled(transform(f))(tensor(POINTS))


def test_a_tensor_that_a_rule_closes_over_is_refused():
    @custom_vjp
    def closing(x):
        return x * WEIGHT, lambda u: u * WEIGHT

    # In compiled code it would have no gradient, and no error could be raised for who wants one.
    with pytest.raises((LookupError, torch._dynamo.exc.Unsupported), match=r"refusal|reads a tens"):
        compiled(closing)(point())
