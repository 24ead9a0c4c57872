"""Symbolic dimensions, and models exported with them."""

import keras
import numpy as np
import pytest
from keras import ops
from protocols import RULES
from transformations import BACKEND, array, reverse, tensor

POINTS = np.random.default_rng(5).normal(size=(4, 3))


FORMS = ["value_with_a_hessian", "method", "integers"]

if BACKEND == "jax":
    import jax

    def total(f):
        return lambda x: ops.sum(f(x))

    TRANSFORMATIONS = {
        "value": lambda f: f,
        "grad": lambda f: jax.grad(total(f)),
        "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x**2,))[1],
        "grad of vmap": lambda f: jax.grad(total(jax.vmap(f))),
        "vmap of grad": lambda f: jax.vmap(jax.grad(total(f))),
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
        for t in (TRANSFORMATIONS if "value" in form else reverse(TRANSFORMATIONS))
        if form != "integers" or not t.startswith("vmap of") or t == "vmap of grad"  # it is linear
    ],
)
def test_symbolic_dimensions_of_jax(transformation, form):
    transformed = TRANSFORMATIONS[transformation]
    f, truth = map(transformed, RULES[form])
    shape = jax.export.symbolic_shape("batch, 3")
    symbolic = jax.ShapeDtypeStruct(shape, "float64")
    exported = jax.export.export(jax.jit(f))(symbolic)
    for n in (1, 4):
        x = tensor(POINTS[:n])
        np.testing.assert_allclose(exported.call(x), truth(x), rtol=1e-12)


@keras.saving.register_keras_serializable("exported")
class Layer(keras.layers.Layer):
    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.form = form

    def call(self, x):
        return RULES[self.form][0](x)


@pytest.mark.filterwarnings("ignore")  # of jax2tf and torch.export about themselves
@pytest.mark.parametrize(
    ("form", "functional"),
    [*[(form, False) for form in FORMS], ("integers", True)],
)
def test_an_exported_model(form, functional, tmp_path):
    f, truth = RULES[form]
    inputs = keras.Input((3,), dtype="float64")
    outputs = f(inputs) if functional else Layer(form, dtype="float64")(inputs)
    model = keras.Model(inputs, outputs)
    if BACKEND == "torch":
        import torch

        batch = torch.export.Dim("batch")
        args = (tensor(POINTS),)
        run = torch.export.export(model, args, dynamic_shapes=((({0: batch}),),)).module()
    else:
        import tensorflow as tf

        model.export(tmp_path / "model", verbose=False)
        loaded = tf.saved_model.load(tmp_path / "model")

        def run(x):
            return loaded.serve(tf.constant(array(x)))

    for n in (2, 4):
        x = tensor(POINTS[:n])
        np.testing.assert_allclose(array(model(x)), array(truth(x)), rtol=1e-6)
        np.testing.assert_allclose(array(run(x)), array(truth(x)), rtol=1e-6)
