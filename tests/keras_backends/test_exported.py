"""Symbolic dimensions, and models exported with them."""

import keras
import numpy as np
import pytest
from keras import ops
from transformations import BACKEND, array, reverse, tensor

from sgtrick.keras import custom_gradient, custom_vjp

POINTS = np.random.default_rng(5).normal(size=(4, 3))


def truth(x):
    return ops.sum(x**4, -1)


def value(x):
    kept = ops.stop_gradient(x)
    fx = ops.stop_gradient(truth(x))
    return custom_gradient(fx, 4 * x**3, x, hx=lambda v: 12 * kept**2 * v)


@custom_vjp
def rule(x):
    return ops.stop_gradient(truth(x)), lambda u: 4 * x**3 * u[..., None]


@custom_vjp
def rule_with_an_int(x):
    y = ops.stop_gradient(truth(x))
    return (y, ops.cast(y, "int32")), lambda u, _: 4 * x**3 * u[..., None]


FORMS = {"value": value, "rule": rule, "with an int": lambda x: rule_with_an_int(x)[0]}

if BACKEND == "jax":
    import jax

    def total(f):
        return lambda x: ops.sum(f(x))

    TRANSFORMATIONS = {
        "value": lambda f: f,
        "grad": lambda f: jax.grad(total(f)),
        "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x**2,))[1],
        "grad of vmap": lambda f: jax.grad(total(jax.vmap(f))),
        "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
        "vmap of jacrev of jacrev": lambda f: jax.vmap(jax.jacrev(jax.jacrev(f))),
        "vmap of hessian": lambda f: jax.vmap(jax.hessian(f)),
    }
else:
    TRANSFORMATIONS = {}


@pytest.mark.parametrize(
    ("transformation", "form"),
    [
        (t, form)
        for form in FORMS
        for t in (TRANSFORMATIONS if form == "value" else reverse(TRANSFORMATIONS))
    ],
)
def test_symbolic_dimensions_of_jax(transformation, form):
    transformed = TRANSFORMATIONS[transformation]
    shape = jax.export.symbolic_shape("batch, 3")
    symbolic = jax.ShapeDtypeStruct(shape, "float64")
    exported = jax.export.export(jax.jit(transformed(FORMS[form])))(symbolic)
    for n in (1, 4):
        x = tensor(POINTS[:n])
        np.testing.assert_allclose(exported.call(x), transformed(truth)(x), rtol=1e-12)


@keras.saving.register_keras_serializable("exported")
class Norm(keras.layers.Layer):
    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.form = form

    def call(self, x):
        return FORMS[self.form](x)


@pytest.mark.filterwarnings("ignore")  # of jax2tf and torch.export about themselves
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("style", ["layer", "functional"])
def test_an_exported_model(form, style, tmp_path):
    inputs = keras.Input((3,), dtype="float64")
    if style == "functional" and form != "value":
        outputs = FORMS[form](inputs)
    else:
        outputs = Norm(form, dtype="float64")(inputs)
    model = keras.Model(inputs, outputs)
    x = tensor(POINTS)
    np.testing.assert_allclose(array(model(x)), array(truth(x)), rtol=1e-6)
    if BACKEND == "torch":
        import torch

        batch = torch.export.Dim("batch")
        exported = torch.export.export(model, (x,), dynamic_shapes=((({0: batch}),),)).module()
        for n in (2, 4):
            came = exported(x[:n])
            np.testing.assert_allclose(array(came), array(truth(x[:n])), rtol=1e-6)
        return
    import tensorflow as tf

    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    for n in (1, 4):
        came = loaded.serve(tf.constant(POINTS[:n]))
        np.testing.assert_allclose(came, array(truth(x[:n])), rtol=1e-6)
