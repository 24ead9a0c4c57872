# A posterior written in R, sampled by the NUTS of TensorFlow Probability.
#
# Infertility after abortion, 83 cases and 165 controls (Trichopoulos et al. 1976; ?infert). The
# logistic regression on its help page, with a flat prior, so that glm() knows the answer: with 248
# women, the posterior is close to a normal around its estimate with its standard errors.

Sys.setenv(TF_CPP_MIN_LOG_LEVEL = "3")
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
  tfp <- import("tensorflow_probability", convert = FALSE)
  sgtrick <- import("sgtrick")
})

# The model: a log density and its gradient, in R --------------------------------------------------

X <- model.matrix(~ spontaneous + induced, data = infert)
y <- infert$case

log_posterior <- function(beta) {
  eta <- drop(X %*% beta)
  value <- sum(y * eta - log1p(exp(eta)))
  gradient <- drop(crossprod(X, y - plogis(eta)))
  list(value, gradient)
}

# Four chains of NUTS ------------------------------------------------------------------------------

# R can only be called on its own thread. TensorFlow computes on another while this one serves it.
executor <- sgtrick$MainThreadExecutor()
target <- sgtrick$from_numpy(log_posterior, executor = executor, name = "log_posterior")

kernel <- tfp$mcmc$DualAveragingStepSizeAdaptation(
  tfp$mcmc$NoUTurnSampler(target, step_size = 0.2, max_tree_depth = 5L),
  num_adaptation_steps = 150L
)
start <- proc.time()[["elapsed"]]
draws <- executor$run(
  tf$`function`(tfp$mcmc$sample_chain, autograph = FALSE),
  num_results = 400L,
  num_burnin_steps = 200L,
  current_state = tf$zeros(c(4L, ncol(X)), dtype = "float64"),
  kernel = kernel,
  trace_fn = NULL,
  seed = c(1L, 2L)
)
seconds <- proc.time()[["elapsed"]] - start

rhat <- py_to_r(tfp$mcmc$potential_scale_reduction(draws)$numpy()$tolist())
draws <- py_to_r(tf$reshape(draws, c(-1L, ncol(X)))$numpy()$tolist())
draws <- do.call(rbind, draws) # one row for each draw

# Draws against glm --------------------------------------------------------------------------------

estimates <- coef(summary(glm(case ~ spontaneous + induced, data = infert, family = binomial)))
table <- data.frame(
  "posterior mean" = colMeans(draws),
  "glm estimate" = estimates[, "Estimate"],
  "posterior sd" = apply(draws, 2, sd),
  "glm std. error" = estimates[, "Std. Error"],
  "R-hat" = rhat,
  check.names = FALSE
)
cat(nrow(draws), "draws,", target$calls, "calls of R,", round(seconds), "s\n\n")
print(round(table, 3))

off <- abs(table$`posterior mean` - table$`glm estimate`) / table$`glm std. error`
spread <- table$`posterior sd` / table$`glm std. error`
stopifnot(
  "the chains have not mixed" = rhat < 1.05,
  "posterior means are off" = off < 0.25,
  "posterior standard deviations are off" = abs(spread - 1) < 0.15
)
cat("\nThe draws agree with glm.\n")
