# Trouble in the middle of a chain: prints what R is told of it, and whether chains run afterwards.

library(reticulate)
tf <- import("tensorflow", convert = FALSE)
tfp <- import("tensorflow_probability", convert = FALSE)
sgtrick <- import("sgtrick")

executor <- sgtrick$MainThreadExecutor()

# A chain whose 100th call of R does `trouble()`.
chain <- function(trouble, ...) {
  calls <- 0
  log_density <- function(x) {
    calls <<- calls + 1
    if (calls == 100) trouble()
    list(-sum(x^2) / 2, -x)
  }
  target <- sgtrick$from_numpy(log_density, name = "log_density", ...)
  outcome <- tryCatch({
    draws <- executor$run(
      tf$`function`(tfp$mcmc$sample_chain, autograph = FALSE),
      num_results = 50L,
      current_state = tf$zeros(c(2L, 3L), dtype = "float64"),
      kernel = tfp$mcmc$HamiltonianMonteCarlo(target, step_size = 0.2, num_leapfrog_steps = 3L),
      trace_fn = NULL,
      seed = c(1L, 2L)
    )
    draws <- py_to_r(tf$reshape(draws, c(-1L, 3L))$numpy()$tolist())
    paste(dim(do.call(rbind, draws)), collapse = " ")
  }, error = conditionMessage, interrupt = function(e) "interrupted")
  list(outcome = outcome, calls = calls, failures = target$failures)
}

fail <- function() stop("the solver lost its way")
interrupt <- function() {
  tools::pskill(Sys.getpid(), tools::SIGINT)
  Sys.sleep(10)
}
results <- list(
  error = chain(fail, executor = executor),
  rejection = chain(fail, executor = executor, on_error = -Inf),
  interrupt = chain(interrupt, executor = executor, on_error = -Inf),
  "no executor" = chain(fail),
  "no trouble" = chain(function() NULL, executor = executor)
)
cat(jsonlite::toJSON(results, auto_unbox = TRUE))
