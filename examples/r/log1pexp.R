# log(1 + exp(x)) with a stable gradient, from R.
#
# The example of ?keras3::op_custom_gradient, through sgtrick. For large x, autodiff gets the
# gradient as Inf / Inf. The rule that we know is 1 - 1 / (1 + exp(x)), which R calls plogis(x).

Sys.setenv(TF_CPP_MIN_LOG_LEVEL = "3", KERAS_BACKEND = "tensorflow")
library(reticulate)

# TensorFlow greets on stderr before it has read its log level.
quietly <- function(imports) {
  os <- import("os")
  stderr_copy <- os$dup(2L)
  os$dup2(os$open(os$devnull, os$O_WRONLY), 2L)
  outcome <- try(imports, silent = TRUE)
  os$dup2(stderr_copy, 2L)
  if (inherits(outcome, "try-error")) stop(outcome)
}
quietly({
  tf <- import("tensorflow", convert = FALSE) # tensors stay tensors until py_to_r()
  ops <- import("keras", convert = FALSE)$ops
  sgtrick_keras <- import("sgtrick.keras")
})

# A function that returns its value and its gradient rule. In keras3 the rule is called in one way
# by TensorFlow and JAX and in another by PyTorch; here it is a function of `upstream` everywhere.
log1pexp <- sgtrick_keras$custom_vjp(function(x) {
  e <- ops$exp(x)
  grad <- function(upstream) {
    ops$multiply(upstream, ops$subtract(1, ops$divide(1, ops$add(1, e))))
  }
  tuple(ops$log(ops$add(1, e)), grad)
})

by_autodiff <- function(x) ops$log(ops$add(1, ops$exp(x)))

gradient <- function(f, x) {
  x <- tf$constant(x)
  with(tf$GradientTape() %as% tape, {
    tape$watch(x)
    y <- f(x)
  })
  py_to_r(tape$gradient(y, x)$numpy()$tolist())
}

x <- c(-2, 0, 1, 100)
gradients <- data.frame(
  x = x,
  autodiff = gradient(by_autodiff, x),
  sgtrick = gradient(log1pexp, x),
  # vectorized_map drops the rule of tf.custom_gradient, and that of keras3 with it.
  `sgtrick, mapped` = gradient(function(x) tf$vectorized_map(log1pexp, x), x),
  plogis = plogis(x),
  check.names = FALSE
)
print(gradients, digits = 4, row.names = FALSE)

stopifnot(
  "the gradient is not plogis" = abs(gradients$sgtrick - gradients$plogis) < 1e-6,
  "the mapped gradient is not plogis" = abs(gradients$`sgtrick, mapped` - gradients$plogis) < 1e-6
)
