"""`torch.compile` of both forms as one graph, and what it refuses."""

import numpy as np
import pytest
from keras import ops
from protocols import RULES, arguments
from transformations import BACKEND, pulled, tensor

from sgtrick.keras import custom_vjp

if BACKEND != "torch":
    pytest.skip("of torch alone", allow_module_level=True)

import torch
from transformations import compiled

POINTS = np.random.default_rng(5).normal(size=(4, 3))
WEIGHT = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
# It does not trace decorators, and objects that it cannot look into.
TRACED = [
    "value",
    "value_with_a_hessian",
    "nested_arguments_and_outputs",
    "numbers_in_a_structure",
    "method",
    "without_self",
    "under all names upstream",
    "with_a_default",
    "grad_is_a_partial_of_a_lambda",
]


@pytest.mark.parametrize("form", TRACED)
def test_one_graph_with_the_gradient(form):
    f, truth = RULES[form]
    args = [tensor(x).requires_grad_() for x in arguments(truth)]

    def first(f):
        y = f(*args) * tensor([1.0, 0.0, -2.0, 3.0])
        total = ops.sum(y) + ops.sum(args[0] ** 3)
        return torch.autograd.grad(total, args, create_graph=True)

    came = first(compiled(f, fullgraph=True))
    torch.testing.assert_close(came, first(truth))
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(ops.sum(came[0]), args[0])


@pytest.mark.parametrize("form", ["value", "method"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, torch.func.vmap])
def test_transformations_inside_are_refused(form, transform):
    f = RULES[form][0] if transform is torch.func.vmap else pulled(RULES[form][0], 1.0)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"inside transformations of torch\.func"
    ):
        compiled(transform(f), fullgraph=True)(tensor(POINTS))


def test_a_tensor_that_a_rule_closes_over_is_refused():
    @custom_vjp
    def closing(x):
        return x * WEIGHT, lambda u: u * WEIGHT

    # In compiled code it would have no gradient, and no error could be raised for who wants one.
    with pytest.raises((LookupError, torch._dynamo.exc.Unsupported), match=r"refusal|reads a tens"):
        compiled(closing, fullgraph=True)(tensor(POINTS).requires_grad_())
