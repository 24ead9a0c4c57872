"""Values defined by an equation: roots of a residual, and samples via their distribution function.

However such a value was computed, its derivatives follow from the equation.
"""

from __future__ import annotations  # signatures that show the names of types

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._arguments.calls import Call
from sgtrick._arguments.rows import Rows, floating
from sgtrick._core import unknown
from sgtrick._core.covered import CoveredArguments
from sgtrick._core.guarded import LIST
from sgtrick._core.kept import with_derivatives
from sgtrick._core.rule import Stated
from sgtrick._core.systems import TWICE, Elimination, Method, Product, Solver, unless
from sgtrick._tensorflow import autograph, connections, graphs, ongoing, tapes, tracing
from sgtrick._types import Function, Gradient, Ndims, Structure, Tensor


def implicit_root(
    residual: Function,
    x_star: Structure,
    *theta: Structure,
    batch_ndims: int = 0,
    solve: Function | None = None,
) -> Structure:
    """The root `x_star` of `residual(x, *theta) = 0`, with its derivatives with respect to `theta`.

    However the root was found, in TensorFlow or outside, the implicit function theorem gives its
    derivatives ::

        dx = -J^-1 dr,    J the Jacobian of residual with respect to x,

    where `dr` is the change of `residual(x, *theta)` at a fixed `x`. When a gradient is requested,
    reverse mode solves a system with the transpose of `J`. Derivatives of every order are exact.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> a = tf.constant(2.0)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(a)
        ...     x = sgtrick.implicit_root(lambda x, a: x**2 - a, 1.41421356, a)
        >>> print(tape.gradient(x, a).numpy().round(4))  # 1 / (2 sqrt(a))
        0.3536

    By default `J` is computed as a matrix: with `n` unknowns this takes `n` pullbacks of the
    residual, memory for `n^2` numbers and a QR decomposition, `O(n^3)`, for each batch member. For
    more than some hundred unknowns, pass a function `solve` that needs only products with `J` or
    its transpose, such as the method of conjugate gradients where `J` is symmetric and positive
    definite ::

        >>> def solve(matvec, b):  # by Jacobi's method, as the diagonal of J is about 3
        ...     v = tf.zeros_like(b)
        ...     for _ in range(20):
        ...         v += (b - matvec(v)) / 3
        ...     return v
        >>> def residual(x, a):
        ...     return 3 * x + tf.roll(x, 1, 0) / 4 - a
        >>> a = tf.fill([1000], 6.5)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(a)
        ...     x = sgtrick.implicit_root(residual, tf.fill([1000], 2.0), a, solve=solve)
        >>> print(tape.gradient(x, a)[:3].numpy().round(4))  # 1 / (3 + 1/4)
        [0.3077 0.3077 0.3077]

    Args:
        residual: Called as `residual(x, *theta)` with an `x` like `x_star`; returns the structure,
            shapes and dtypes of `x_star`. The root also gets derivatives with respect to other
            tensors and variables that the residual depends on. What it stops counts as a constant,
            and must not be `x`.
        x_star: The root: a floating tensor or a structure of these, all of one dtype. It is
            stopped. The derivatives are as accurate as the root.
        *theta: Arguments with respect to which the root is differentiated, of any structure. They
            may also be objects that hold tensors, such as ragged and sparse tensors, distributions
            and Keras layers.
        batch_ndims: The number of leading dimensions of `x_star` over which roots are independent:
            the residual of each depends on no other root. 0 is always correct, and solves one
            system for all; with a batch there is a small system for each root.
        solve: Called as `solve(matvec, b)` when a derivative is requested; returns the `v` with
            `matvec(v) = b`, up to half of the digits of the dtype. `matvec` is linear: the product
            with `J` or with its transpose. `b`, `v`, and what `matvec` takes and returns have the
            structure, shapes and dtype of `x_star`: it is one system for a batch, too. What is
            tested is the norm of `matvec(v) - b` beside that of `b`: of all unknowns, and of each
            part that is a system of its own, so that a small one is solved as well as a large one
            beside it. Parts are the leaves of `x_star`, and what its leading dimensions number; one
            more product for each way to divide the unknowns finds out if they are systems of their
            own. Within a system, equations should be of one size. The solution has derivatives of
            every order, by further solves; `solve` itself is not differentiated. By default, `J` is
            a matrix and is decomposed.

    Returns:
        The structure, dtype and value of `x_star`, even where it is not finite or not a root. Where
        the `J` of a batch member is singular, its root has no derivative, and the gradient that
        flows back into `residual` is NaN. Systems of several unknowns are solved by QR, which
        TFLite does not support (converting raises an error).

    Raises:
        TypeError: `x_star` is not floating or mixes dtypes, or the residual has another dtype.
        ValueError: The residual or the result of `solve` does not have the structure or shapes of
            `x_star`, or the residual does not depend on it, `batch_ndims` is not a number of
            dimensions of `x_star`, or it is passed together with `solve`; or, in a graph, the
            residual closes over a `tf.TensorArray`.
        LookupError: When differentiated, if the result of `solve` is not the solution, or if the
            residual of a batch member depends on the root of another, passes what has derivatives
            to a host call without its own gradient, or reads a variable that has been assigned
            since. Inside a `tf.function` this is a `tf.errors.InvalidArgumentError`
            when the function runs; around it and in XLA, the derivative is NaN. Second derivatives
            by what TensorFlow cannot differentiate twice, such as the parameter of `igamma`, are
            its own LookupError, also while it traces.
    """
    _check_ndims(batch_ndims, "batch_ndims")
    if solve is not None and batch_ndims:
        raise ValueError(
            f"batch_ndims={batch_ndims} was passed together with solve, which solves one system "
            "for all members. Pass one of the two."
        )
    residual = autograph.as_caller(residual)
    solve = None if solve is None else autograph.as_caller(solve)
    return _root(residual, x_star, theta, batch_ndims, ("residual", "x_star", "theta"), solve)


def implicit_reparameterize(
    distribution_cdf: Function,
    sample: Structure,
    *params: Structure,
    event_ndims: int = 0,
) -> Structure:
    """A sample with its derivatives with respect to the parameters of its distribution.

    Whatever the parameters, the value `u = F(x, params)` of the distribution function at a sample
    is uniform. With `u` held fixed, the sample is the root of `F(x, params) = u`, so this is
    `implicit_root`. (Figurnov, Mohamed, Mnih 2018, https://arxiv.org/abs/1805.08498)

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> def cdf(x, rate):  # of the exponential distribution
        ...     return 1 - tf.exp(-rate * x)
        >>> rate, sample = tf.constant(2.0), tf.constant([0.1, 0.5, 1.0])  # from any sampler
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(rate)
        ...     mean = tf.reduce_mean(sgtrick.implicit_reparameterize(cdf, sample, rate))
        >>> print(tape.gradient(mean, rate).numpy().round(4))  # -mean / rate
        -0.2667

    Args:
        distribution_cdf: Called as `distribution_cdf(sample, *params)`, returns the shape and dtype
            of `sample`: the distribution function of each entry; with `event_ndims` the conditional
            distribution function of each entry given the previous ones (the Rosenblatt transform).
            Any other function that maps the sample to a variable whose distribution does not depend
            on the parameters works too, such as the logarithm of the survival function far out in
            a tail, where the distribution function is flat.
        sample: A floating tensor, from any sampler. It is stopped.
        *params: Parameters with respect to which the sample is differentiated, as `theta` of
            `implicit_root`.
        event_ndims: The number of trailing dimensions of `sample` that make up an event. Entries of
            an event may depend on each other; different events may not.

    Returns:
        The dtype and value of `sample`. Where the density is zero, the gradient that flows back
        into `distribution_cdf` is NaN.

    Raises:
        TypeError: `sample` is not floating, or `distribution_cdf` returns another dtype.
        ValueError: `distribution_cdf` does not return the shape of `sample` or does not depend on
            it, or `event_ndims` is not a number of dimensions of `sample`.
        LookupError: When differentiated, if entries of different events depend on each other. Where
            nothing can raise, as in `implicit_root`.
    """
    distribution_cdf = autograph.as_caller(distribution_cdf)
    return _reparameterized(distribution_cdf, sample, params, event_ndims)


@autograph.unconverted
def _reparameterized(
    distribution_cdf: Function, sample: Structure, params: Structure, event_ndims: int
) -> Structure:
    sample = floating(sample, "sample", tf.nest.flatten(params))
    _check_ndims(event_ndims, "event_ndims")
    rank = tf.rank(sample) if sample.shape.rank is None else sample.shape.rank
    if isinstance(rank, int) and rank < event_ndims:
        shape = shapes.show(structures.static_shape(sample))
        raise ValueError(
            f"sample has shape {shape}, fewer dimensions than event_ndims={event_ndims}."
        )
    names = ("distribution_cdf", "sample", "params")
    return _root(distribution_cdf, sample, params, rank - event_ndims, names)


@autograph.unconverted
def _root(
    residual: Function,
    x_star: Structure,
    theta: Structure,
    batch_ndims: Ndims,
    names: tuple[str, str, str],
    solve: Function | None = None,
) -> Structure:
    name, x_name, theta_name = names
    names_of_theta = [f"{theta_name}[{k}]" for k in range(len(theta))]
    # An argument that holds tensors is passed on as it is, and the residual closes over them.
    covered = CoveredArguments(
        Call(theta), range(len(theta)), names_of_theta, structures.may_be_recorded
    )
    rows = Rows(x_star, batch_ndims, x_name, covered.call.leaves)

    def of_rows(x: Tensor, *thetas: Tensor) -> Tensor:
        returned = covered.with_xs(thetas)(lambda *theta: residual(rows.unpack(x), *theta))
        return rows.checked(returned, f"the result of {name}")

    x, thetas = rows.pack(rows.stars), list(map(graphs.here, covered.xs))
    solver = Elimination(name) if solve is None else Method(name, rows, solve)
    equation, closed = _equation(name, x_name, of_rows, solver, [x, *thetas])
    return rows.unpack(_solution(equation, x, [*thetas, *closed]))


def _equation(
    name: str,
    x_name: str,
    residual: Callable[..., Tensor],
    solver: Solver,
    arguments: Sequence[Tensor],
) -> tuple[_Equation, list[Tensor]]:
    """The equation of a residual, and the values of what it closes over.

    Args:
        name: The residual's name in errors.
        x_name: That of its first argument.
        residual: From the root as rows, and `theta`, to rows.
        solver: What solves systems with its Jacobian.
        arguments: Those of the call.
    """

    def outlined(*at: Tensor) -> list[Tensor]:
        with ongoing.probing():
            return [residual(*at)]

    def outlining() -> tracing.Outline:
        return tracing.Outline(outlined, arguments)

    # Accumulators would differentiate the operations of the residual, and cannot where a branch or
    # a loop reads a variable.
    outline = tapes.in_thread(outlining) if tapes.somebody_pushes() else outlining()
    (outcome,) = outline.outputs
    if not connections.depends(outcome, outline.inputs[:1]):
        raise ValueError(
            f"{name} returned something that is not connected to its first argument, {x_name}. "
            "TensorFlow must be able to differentiate it; if it calls code outside TensorFlow, "
            "give it derivatives with one of sgtrick's functions."
        )
    if any(t.dtype == tf.variant and graphs.carries_derivatives(t) for t in outline.captured):
        raise ValueError(LIST.format(name))
    closed = [t for t in outline.captured if structures.is_differentiable(t.dtype)]
    handles, n = outline.handles, len(arguments) - 1

    def r(x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The residual as a function of everything that it depends on."""
        y, reads = residual(x, *inputs[:n]), inputs[n + len(closed) :]
        if not reads:
            return y
        are_unchanged = unknown.are_equal(list(map(graphs.read, handles)), reads)
        return unless(are_unchanged, _ASSIGNED.format(name), y)

    varying = connections.varying(outline.captured, outline.inner)
    calls_host = connections.Subgraph(outcome).host_sees([*outline.inputs, *varying])
    equation = _Equation(name, r, [*closed, *handles], calls_host, solver)
    return equation, [*closed, *map(tapes.read, handles)]


class _Equation(NamedTuple):
    """`r(x, inputs) = 0`, where `x` is a matrix of rows.

    Attributes:
        name: The function's name in errors.
        r: The residual. The last of its inputs are what it closes over, and uses itself.
        closed: What it closes over, with the handles of variables instead of their values.
        calls_host: Whether a host call makes the residual of something that may be differentiated.
        solver: What solves systems with the Jacobian of `r` by `x`.
    """

    name: str
    r: Callable[[Tensor, Sequence[Tensor]], Tensor]
    closed: Sequence[Tensor]
    calls_host: bool
    solver: Solver

    def sources(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What tapes differentiate with respect to: the inputs, or what `r` uses itself."""
        return [*inputs[: len(inputs) - len(self.closed)], *self.closed]

    def by_x(self, x: Tensor, inputs: Sequence[Tensor]) -> Product:
        """The product of vectors with `J'`, the transpose of `J = dr/dx`."""
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(x)
            r = self.r(x, inputs)
        return lambda v: tape.gradient(r, x, v, "zero")


def _solution(equation: _Equation, x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """The solution `x` as a function of the inputs, by the implicit function theorem.

    From `0 = dr = J dx + (dr/dinputs) dinputs` follows the gradient for an upstream gradient `u` ::

        (dr/dinputs)' w,    J' w = -u

    Both `x` and `w` in it are solutions of equations, and are differentiated as such again.
    """
    if tf.executing_eagerly() and not tapes.somebody_records():
        return x
    x, inputs = graphs.here(x), list(map(graphs.here, inputs))

    def pull(u: Tensor) -> list[Gradient]:
        if equation.calls_host:
            return list(unknown.gradients(inputs, _ON_HOST.format(equation.name), [u]))
        # Copies: the same tensor may be several inputs, whose gradients are different ones.
        at = list(map(tf.identity, inputs))
        root = _solution(equation, x, at)
        w = _linear(equation, _solved(equation, u, root, at), u, root, at)
        sources = equation.sources(at)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tapes.watch(tape, sources)
            r = equation.r(root, at)
        return list(tape.gradient(r, sources, w))

    (solution,) = with_derivatives([tf.stop_gradient(x)], inputs, Stated(equation.name, pull))
    return solution


def _linear(
    equation: _Equation,
    w: Tensor,
    u: Tensor,
    x: Tensor,
    inputs: Sequence[Tensor],
    *,
    transposed: bool = True,
) -> Tensor:
    """The solution `w` of `J' w = -u`, or of `J w = -u`, as a function of what comes after it.

    With `M` for the matrix, from `M dw = -du - dM w` follow, for an upstream gradient `z`, the
    gradient `v` by `u`, and those by `x` and the inputs ::

        d<v, M w>,    M' v = -z

    Here `<v, J' w> = <J' w, v>` and `<v, J w> = <J' v, w>`, so that `J'` alone is differentiated.
    """
    w, u, x, *inputs = map(graphs.here, [w, u, x, *inputs])

    def pull(z: Tensor) -> list[Gradient]:
        of_u, at_x, *at = map(tf.identity, [u, x, *inputs])
        found = _solved(equation, z, at_x, at, transposed=not transposed)
        v = _linear(equation, found, z, at_x, at, transposed=not transposed)
        again = _linear(equation, w, of_u, at_x, at, transposed=transposed)
        left, right = (again, v) if transposed else (v, again)

        def by_the_others() -> list[Gradient]:
            sources = [at_x, *equation.sources(at)]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tapes.watch(tape, sources)
                pulled = equation.by_x(at_x, at)(left)
            return list(tape.gradient(pulled, sources, right))

        refused = TWICE.format(equation.name)
        return [v, *unknown.unless_refused(by_the_others, [x, *inputs], [z], refused)]

    (solution,) = with_derivatives(
        [tf.stop_gradient(w)], [u, x, *inputs], Stated(equation.name, pull)
    )
    return solution


def _solved(
    equation: _Equation,
    u: Tensor,
    x: Tensor,
    inputs: Sequence[Tensor],
    *,
    transposed: bool = True,
) -> Tensor:
    """The solution of `J' w = -u`, or of `J w = -u`, without derivatives."""
    u, x, *inputs = map(tf.stop_gradient, [u, x, *inputs])
    v = equation.solver.solve(equation.by_x(x, inputs), -u, transposed=transposed)
    return tf.stop_gradient(v)


def _check_ndims(ndims: int, name: str) -> None:
    if not shapes.is_int(ndims) or ndims < 0:
        raise ValueError(f"{name} must be an int of at least 0, got {shapes.show_option(ndims)}.")


_ON_HOST = (
    "{0} was differentiated with respect to something that it passes to a host call or to NumPy, "
    "where TensorFlow knows no derivative. Give the host call its own gradient with one of "
    "sgtrick's functions. If it is meant to be constant, use tf.stop_gradient of its result."
)

_ASSIGNED = (
    "{0} reads a variable that was assigned between the call and the gradient, which is that "
    "of the call. Assign the variable after the gradient, or pass it as an argument."
)
