# Calls R functions through from_numpy and prints, as JSON, what came back and what R was given.

library(reticulate)
tf <- import("tensorflow", convert = FALSE)
sgtrick <- import("sgtrick")

to_r <- function(tensor) py_to_r(tf$identity(tensor)$numpy()$tolist())
vector <- function(...) tf$constant(list(...))

cases <- list()
errors <- list()

# The value, the gradients by all arguments, and the type and length of what R was given.
case <- function(name, f, args, ...) {
  given <- NULL
  spy <- function(...) {
    given <<- lapply(list(...), function(x) c(typeof(x), length(x)))
    f(...)
  }
  h <- sgtrick$from_numpy(spy, ...)
  with(tf$GradientTape() %as% tape, {
    tape$watch(args)
    y <- do.call(h, args)
  })
  gradients <- Map(
    function(g, x) if (!is.null(g)) to_r(tf$ensure_shape(g, x$shape)),
    py_to_r(tf$nest$flatten(tape$gradient(y, args))),
    py_to_r(tf$nest$flatten(args))
  )
  cases[[name]] <<- list(value = to_r(y), gradients = gradients, given = given)
}

error <- function(name, expression) {
  errors[[name]] <<- tryCatch({ force(expression); "no error" }, error = conditionMessage)
}

square <- function(x) list(sum(x^2), 2 * x)

case("a vector", square, list(vector(1, 2)))
case("a vector of length one", square, list(vector(3)))
case("a number", square, list(tf$constant(3)), event_ndims = 0L)
case("a batch", square, list(tf$constant(list(list(1, 2), list(3, 4)))))
case("a batch of vectors of length one", square, list(tf$constant(list(list(1), list(2)))))
case("a whole batch in one call", function(x) list(x^2, 2 * x), list(vector(1, 2)),
  event_ndims = 0L, vectorized = TRUE)
case("a whole batch of one", function(x) list(x^2, 2 * x), list(vector(3)),
  event_ndims = 0L, vectorized = TRUE)
case("integers from R", function(x) list(5L, c(2L, 4L)), list(vector(1, 2)))
case("integers for R", function(x, n) list(sum(x^n), list(n * x^(n - 1), NULL)),
  list(vector(1, 2), vector(2L, 3L)))
case("one integer for R", function(x, n) list(sum(x^n), list(n * x^(n - 1), NULL)),
  list(vector(1, 2), tf$constant(2L)), event_ndims = tuple(1L, 0L))
case("a gradient beside the value", function(x) sum(x^2), list(vector(1, 2)),
  grad = function(x) 2 * x)
case("a matrix, as a list of its rows",
  function(x) {
    m <- do.call(rbind, x)
    list(sum(m^2), lapply(seq_len(nrow(m)), function(i) 2 * m[i, ]))
  },
  list(tf$constant(list(list(1, 2), list(3, 4)))), event_ndims = 2L)
case("a named list",
  function(p) {
    stopifnot(is.list(p), setequal(names(p), c("slopes", "scale")))
    list(sum(p$slopes^2) * p$scale, list(slopes = 2 * p$slopes * p$scale, scale = sum(p$slopes^2)))
  },
  list(dict(scale = tf$constant(3), slopes = vector(1, 2))),
  event_ndims = dict(scale = 0L, slopes = 1L))
case("named vectors, whose names are dropped", function(x) list(5, c(a = 2, b = 4)),
  list(vector(1, 2)))
case("numbers that are not finite", function(x) list(-Inf, c(NA_real_, Inf)), list(vector(1, 2)))

executor <- sgtrick$MainThreadExecutor()
served <- sgtrick$from_numpy(square, executor = executor)
cases[["served by run"]] <- list(value = to_r(executor$run(served, vector(1, 2))))

error("an error in R", sgtrick$from_numpy(function(x) stop("no root below ", x[2]))(vector(1, 2)))
error("a matrix from R", sgtrick$from_numpy(function(x) list(x %o% x, 2 * x))(vector(1, 2)))
error("NA", sgtrick$from_numpy(function(x) list(NA, 2 * x))(vector(1, 2)))
error("a number for a vector", sgtrick$from_numpy(function(x) list(5, 2))(vector(1, 2)))
pool <- import("concurrent.futures")$ThreadPoolExecutor(1L)
error("another executor", sgtrick$from_numpy(square, executor = pool)(vector(1, 2)))

results <- list(cases = cases, errors = errors)
cat(jsonlite::toJSON(results, auto_unbox = TRUE, null = "null", na = "string", digits = NA))
