"""What torch allows and no other backend: tensors that change, and ids that come again."""

import functools
import types

import keras
import numpy as np
import pytest
from keras import ops
from transformations import BACKEND, array, tensor

from sgtrick.keras import custom_vjp

if BACKEND != "torch":
    pytest.skip("of torch alone", allow_module_level=True)

import torch

POINTS = np.array([0.0, 1.0])
MASK = torch.ones(2, dtype=torch.float64)


class Kept:
    """A rule whose functions are methods."""

    def __init__(self):
        self.mask = torch.ones(2, dtype=torch.float64)

    def masked(self, x):
        return x + 0, self.grad

    def grad(self, u):
        return u * self.mask


def exp(x, grad):
    y = ops.exp(x)
    return y, grad(y)


# How a rule may keep its result.
OF_THE_RESULT = {
    "in its closure": lambda x: exp(x, lambda y: lambda u: u * y),
    "in a closure of a closure": lambda x: exp(x, lambda y: lambda u: (lambda: u * y)()),
    "in a list": lambda x: exp(x, lambda y: lambda u, ys=[y]: u * ys[0]),
    "in a partial": lambda x: exp(x, lambda y: functools.partial(torch.multiply, y)),
    "with all arguments": lambda x: exp(x, lambda y: lambda *args, upstream: upstream * y),
}


@pytest.mark.parametrize("form", OF_THE_RESULT)
def test_a_result_that_the_rule_keeps(form):
    """As with torch's own operations: right, or its error."""
    x = tensor(POINTS).requires_grad_()
    out = custom_vjp(OF_THE_RESULT[form])(x)
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_result_that_it_does_not_keep():
    x = tensor(POINTS).requires_grad_()
    out = custom_vjp(lambda x: (ops.exp(x), lambda *args, upstream: upstream * ops.exp(args[0])))(x)
    out += x
    out *= 2
    out.sum().backward()
    np.testing.assert_allclose(array(x.grad), 2 * np.exp(POINTS) + 2)
    np.testing.assert_allclose(array(out.detach()), 2 * (np.exp(POINTS) + POINTS))


class Masked(keras.layers.Layer):
    """A layer whose rules read its state."""

    def __init__(self):
        super().__init__(dtype="float64")
        state = {"initializer": "ones", "trainable": False}
        self.mask, self.count = (self.add_weight(shape=(2,), name=n, **state) for n in "mc")
        self.parts = []

    def call(self, x):
        return custom_vjp(lambda x: (x + 0, lambda u: u * self.mask))(x)

    @custom_vjp
    def by_method(self, x):
        return x + 0, lambda u: self.times(u)

    @custom_vjp
    def by_property(self, x):
        return x + 0, lambda u: sum([u * self.current for _ in range(1)])

    @custom_vjp
    def by_a_part(self, x):
        return x + 0, lambda u: u * self.parts[0].mask

    def times(self, u):
        return u * self.mask

    @property
    def current(self):
        return self.mask + 0


class Buffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return custom_vjp(lambda x: (x + 0, lambda u: u * self.mask))(x)


class Slots:
    __slots__ = ("mask",)


LAYER, SPACE = Masked(), types.SimpleNamespace(mask=torch.ones(2, dtype=torch.float64))
OF_LAYERS = {
    "of self": lambda layer: layer,
    "by a method of self": lambda layer: layer.by_method,
    "by a property of self": lambda layer: layer.by_property,
}


def masks(kind):
    """A mask, and a function whose rule reads it."""
    if kind in OF_LAYERS:
        layer = Masked()
        return layer.mask.value, OF_LAYERS[kind](layer)
    if kind == "of a layer of self":
        layer = Masked()
        layer.parts.append(Masked())
        return layer.parts[0].mask.value, layer.by_a_part
    if kind == "a buffer of torch":
        module = Buffer()
        return module.mask, module
    mask, rule = masks_of_rules(kind)
    return mask, custom_vjp(rule)


def masks_of_rules(kind):
    if kind == "a variable":
        mask = keras.Variable(np.ones(2), dtype="float64", trainable=False)
        return mask.value, lambda x: (x + 0, lambda u: u * mask)
    if kind == "of an object":
        kept = Kept()
        return kept.mask, kept.masked
    if kind == "in slots":
        slots = Slots()
        slots.mask = torch.ones(2, dtype=torch.float64)
        return slots.mask, lambda x: (x + 0, lambda u: u * slots.mask)
    if kind == "of a global layer":
        return LAYER.mask.value, lambda x: (x + 0, lambda u: u * LAYER.mask)
    if kind == "of a global namespace":
        return SPACE.mask, lambda x: (x + 0, lambda u: u * SPACE.mask)
    mask = MASK if "global" in kind else torch.ones(2, dtype=torch.float64)
    return mask, {
        "of grad": lambda x: (x + 0, lambda u: u * mask),
        "of both": lambda x: (x * mask, lambda u: u * mask),
        "global": lambda x: (x + 0, lambda u: u * MASK),
        "of a global function": lambda x: (x + 0, lambda u: times_mask(u)),
    }[kind]


def times_mask(u):
    return u * MASK


KINDS = ["of grad", "of both", "global", "a variable", "of an object", *OF_LAYERS]
KINDS += ["of a layer of self", "a buffer of torch", "in slots", "of a global layer"]
KINDS += ["of a global namespace", "of a global function"]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_is_filled_before_the_backward_pass(kind, create_graph):
    mask, h = masks(kind)
    x = tensor(POINTS).requires_grad_()
    right = torch.autograd.grad(h(x).sum(), x, create_graph=create_graph)
    np.testing.assert_array_equal(array(right[0].detach()), 1)
    y = h(x).sum()
    with torch.no_grad():
        mask.fill_(0.0)
    try:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, x, create_graph=create_graph)
    finally:
        with torch.no_grad():
            mask.fill_(1.0)


def test_what_the_value_alone_reads_may_change():
    """Such as the averages of a batch normalization."""
    state = torch.ones(2, dtype=torch.float64)
    x = tensor(POINTS).requires_grad_()
    y = custom_vjp(lambda x: (x * 2 + 0 * state, lambda u: 2 * u))(x).sum()
    state.fill_(0.0)
    y.backward()
    np.testing.assert_array_equal(array(x.grad), 2)


def test_what_the_rule_does_not_read_may_change():
    """Such as another state of the same layer."""
    layer, x = Masked(), tensor(POINTS).requires_grad_()
    y = ops.sum(layer(x) + layer.by_method(x))
    layer.count.assign(5 * np.ones(2))
    y.backward()
    np.testing.assert_array_equal(array(x.grad), 2)


def unseen(value):
    """A tensor that no mode of torch sees arise."""
    with torch._C.DisableTorchFunction():
        return torch.tensor(value, dtype=torch.float64)


def test_a_tensor_that_is_freed_is_not_taken_for_another():
    """Those of the call are gone when the rule runs again, and theirs get other values."""

    def f(x):
        digits = [unseen(10.0**n) for n in range(4)]
        scale = sum(n * digit for n, digit in enumerate(digits, 1))
        return x * scale, lambda u: sum(n * digit * u for n, digit in enumerate(digits, 1))

    h = custom_vjp(f)
    for _ in range(5):
        gradient = torch.func.grad(lambda x: h(x).sum())(tensor(POINTS))
        np.testing.assert_array_equal(array(gradient), 4321.0)
