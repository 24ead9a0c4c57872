# Writes `grad` in each way that Keras documents and prints, as JSON, the gradients of x * y that
# come out, on the backend of this process.

library(reticulate)
ops <- import("keras", convert = FALSE)$ops
custom_vjp <- import("sgtrick.keras")$custom_vjp

gradients <- py_run_string("
import keras
import numpy as np

def gradients(f, *xs):
    xs = [keras.ops.convert_to_tensor(x, 'float64') for x in xs]
    if keras.backend.backend() == 'jax':
        import jax
        found = jax.grad(lambda xs: f(*xs))(xs)
    elif keras.backend.backend() == 'torch':
        import torch
        xs = [x.requires_grad_() for x in xs]
        found = torch.autograd.grad(f(*xs), xs)
    else:
        import tensorflow as tf
        with tf.GradientTape() as tape:
            tape.watch(xs)
            y = f(*xs)
        found = tape.gradient(y, xs)
    return [float(g) for g in found]
")$gradients

rule <- function(make_grad) {
  custom_vjp(function(x, y) {
    tuple(ops$multiply(x, y), make_grad(x, y))
  })
}

times <- function(upstream, x, y) tuple(ops$multiply(upstream, y), ops$multiply(upstream, x))

found <- list(
  "grad(upstream)" = rule(function(x, y) function(upstream) times(upstream, x, y)),
  "grad(..., upstream = NULL)" = rule(function(x, y) {
    function(..., upstream = NULL) {
      if (is.null(upstream)) upstream <- ..1
      times(upstream, x, y)
    }
  }),
  "grad(..., upstream)" = rule(function(x, y) function(..., upstream) times(upstream, ..1, ..2)),
  "grad(u)" = rule(function(x, y) function(u) times(u, x, y)),
  "grad(...)" = rule(function(x, y) function(...) times(..1, x, y))
)
cat(jsonlite::toJSON(lapply(found, gradients, 3, 5), auto_unbox = TRUE))
