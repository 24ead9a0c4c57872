"""Values defined by an equation: roots of a residual, and samples via their distribution function.

However such a value was computed, its derivatives follow from the equation.
"""

import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._core import adjoint, unknown
from sgtrick._core.guard import LIST
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._tensorflow import autograph, connections, graphs, tapes, tracing
from sgtrick._types import Function, Gradient, Ndims, Structure, Tensor, TensorLike


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
            tensors and variables that the residual depends on. It must not stop `x` in part, which
            would change `J`.
        x_star: The root: a floating tensor or a structure of these, all of one dtype. It is
            stopped. The derivatives are as accurate as the root.
        *theta: Arguments with respect to which the root is differentiated, of any structure.
        batch_ndims: The number of leading dimensions of `x_star` over which roots are independent:
            the residual of each depends on no other root. 0 is always correct, and solves one
            system for all; with a batch there is a small system for each root.
        solve: Called as `solve(matvec, b)` when a derivative is requested; returns the `v` with
            `matvec(v) = b`, up to half of the digits of the dtype. `matvec` is linear: the product
            with `J` or with its transpose. `b`, `v`, and what `matvec` takes and returns have the
            structure, shapes and dtype of `x_star`: it is one system for a batch, too. The solution
            has derivatives of every order, by further solves; `solve` itself is not differentiated.
            By default, `J` is a matrix and is decomposed.

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
            residual of a batch member depends on the root of another, passes something that has
            derivatives to a host call without its own gradient, or reads a variable that has been
            assigned since. Inside a `tf.function` this is a `tf.errors.InvalidArgumentError` when
            the function runs; around it and in XLA, the derivative is NaN.
    """
    if not shapes.is_int(batch_ndims) or batch_ndims < 0:
        raise ValueError(
            f"batch_ndims must be an int of at least 0, got {shapes.show_option(batch_ndims)}."
        )
    if solve is not None and batch_ndims:
        raise ValueError(
            f"batch_ndims={batch_ndims} was passed together with solve, which solves one system "
            "for all members. Pass one of the two."
        )
    residual = autograph.as_caller(residual)
    solve = None if solve is None else autograph.as_caller(solve)
    return _root(residual, x_star, theta, batch_ndims, ("residual", "x_star"), solve)


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
        *params: Parameters with respect to which the sample is differentiated, of any structure.
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
    sample = _floating(sample, "sample")
    rank = tf.rank(sample) if sample.shape.rank is None else sample.shape.rank
    if not shapes.is_int(event_ndims) or event_ndims < 0:
        raise ValueError(
            f"event_ndims must be an int of at least 0, got {shapes.show_option(event_ndims)}."
        )
    if isinstance(rank, int) and rank < event_ndims:
        shape = shapes.show(structures.static_shape(sample))
        raise ValueError(
            f"sample has shape {shape}, fewer dimensions than event_ndims={event_ndims}."
        )
    names = ("distribution_cdf", "sample")
    return _root(distribution_cdf, sample, params, rank - event_ndims, names)


@autograph.unconverted
def _root(
    residual: Function,
    x_star: Structure,
    theta: Structure,
    batch_ndims: Ndims | None,
    names: tuple[str, str],
    solve: Function | None = None,
) -> Structure:
    rows = _Rows(x_star, batch_ndims, names[1])
    flat = tf.nest.flatten(theta)
    places = [i for i, t in enumerate(flat) if structures.has_derivatives(t)]

    def r(x: Tensor, *thetas: Tensor) -> Tensor:
        others = list(flat)
        for i, t in zip(places, thetas, strict=True):
            others[i] = t
        returned = residual(rows.unpack(x), *tf.nest.pack_sequence_as(theta, others))
        return rows.checked(returned, f"the result of {names[0]}")

    x = rows.pack(rows.stars)
    thetas = [graphs.here(structures.as_tensor(flat[i])) for i in places]
    traced = tracing.Traced(r, tracing.specs_of([x, *thetas]))
    if not connections.are_connected(traced.outputs[0], traced.inputs[:1]):
        raise ValueError(
            f"{names[0]} returned something that is not connected to its first argument, "
            f"{names[1]}. TensorFlow must be able to differentiate it; if it calls code outside "
            "TensorFlow, give it derivatives with one of sgtrick's functions."
        )
    of_rows = None if solve is None else rows.solving(solve)
    if any(t.dtype == tf.variant and graphs.carries_derivatives(t) for t in traced.captured):
        raise ValueError(LIST.format(names[0]))
    equation = _Equation(names[0], traced, of_rows)
    reads = list(map(tapes.read, traced.handles))
    return rows.unpack(_solved(equation, x, thetas, traced.captured, reads))


class _Equation:
    """`r(x, *thetas) = 0`, where `x` is a matrix of rows.

    Attributes:
        name: The function's name in errors.
        r: The traced residual. Other tensors that it uses are captured, and can be replaced.
        solve: Solves linear systems, given a function for the product with the matrix.
        calls_host: Whether a host call makes the residual of something that may be differentiated.
    """

    def __init__(self, name: str, r: tracing.Traced, solve: Function | None) -> None:
        self.name, self.r, self.solve = name, r, solve
        varying = connections.varying(r.captured, r.inner)
        self.calls_host = connections.Subgraph(r.outputs[0]).host_sees([*r.inputs, *varying])


def _solved(
    equation: _Equation,
    x: Tensor,
    thetas: list[Tensor],
    captured: list[Tensor],
    reads: list[Tensor],
) -> Tensor:
    """The root `x`, as a function of everything that the equation depends on."""
    name = equation.name
    captured = list(map(graphs.here, captured))
    x, thetas = graphs.here(x), list(map(graphs.here, thetas))
    are_live = [structures.is_differentiable(t.dtype) for t in captured]
    inputs = [*thetas, *itertools.compress(captured, are_live), *reads]

    def pull(upstream: Tensor) -> list[Gradient]:
        if equation.calls_host:
            return list(unknown.failures(inputs, _ON_HOST.format(name), [upstream]))
        # Equal tensors have to be told apart, and a tensor that a graph has captured before is not
        # recorded when it is used again.
        ts, cs = list(map(tf.identity, thetas)), list(map(_distinct, captured))
        root = _solved(equation, x, ts, cs, reads)
        # Before the residual, which may assign variables itself.
        unchanged = _are_unchanged(equation.r.handles, reads) if reads else None
        if equation.solve is None:
            j = _jacobian(name, lambda x, ts, cs: equation.r([x, *ts], cs), root, ts, cs)
            weights = -_solve(tf.linalg.matrix_transpose(j), upstream)
        else:
            weights = -_solution(equation, [root, *ts], cs, reads, upstream, transposed=True)
        if unchanged is not None:
            weights = _unless(unchanged, _ASSIGNED.format(name), weights)
        sources = [*ts, *itertools.compress(cs, are_live), *equation.r.handles]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            r = equation.r([root, *ts], cs)
        return list(tape.gradient(r, sources, output_gradients=weights))

    (root,) = keep([tf.stop_gradient(x)], inputs, Rule(name, pull))
    return root


def _distinct(t: Tensor) -> Tensor:
    """A tensor in the graph that is being traced; another object if it has derivatives."""
    return tf.identity(t) if structures.is_differentiable(t.dtype) else graphs.here(t)


def _unless(holds: Tensor, message: str, t: Tensor) -> Tensor:
    """`t`, or an error with this message, or NaN, if `holds` is false."""
    zero = tf.cast(unknown.zero_if(holds, message, []), t.dtype)
    # Also a factor, so that the derivatives are NaN too; not only, since TensorFlow's optimizer may
    # take the product of a constant 0 and NaN for 0.
    return t * (1 + zero) + zero


def _are_unchanged(handles: list[Tensor], reads: list[Tensor]) -> Tensor:
    """Whether variables still have the values that were read."""
    same = []
    for now, then in zip(map(graphs.read, handles), reads, strict=True):
        both_nan = tf.not_equal(now, now) & tf.not_equal(then, then)
        same.append(tf.reduce_all(tf.equal(now, then) | both_nan))
    return tf.reduce_all(tf.stack(same))


def _solve(m: Tensor, b: Tensor) -> Tensor:
    """Solutions `s` of `m s = b` for matrices `[roots, n, n]`, with derivatives of every order."""
    m, b = graphs.here(m), graphs.here(b)
    if m.shape[-1] == 1:
        m = m[..., 0]
        fixed = tf.stop_gradient(m)
        regular = tf.math.is_finite(fixed) & tf.not_equal(fixed, 0)
        # A factor, so that the derivatives are NaN too where there is no solution.
        return b / m * tf.where(regular, tf.ones_like(fixed), np.nan)
    s = tf.linalg.matvec(_inverse(tf.stop_gradient(m)), tf.stop_gradient(b))

    def pull(upstream: Tensor) -> list[Gradient]:
        # m s = b: dm s + m ds = db
        by_b = _solve(tf.linalg.matrix_transpose(m), upstream)
        return [-by_b[..., tf.newaxis] * _solve(m, b)[..., tf.newaxis, :], by_b]

    return keep([s], [m, b], Rule("implicit_root", pull))[0]


def _solution(
    equation: _Equation,
    point: list[Tensor],
    captured: list[Tensor],
    reads: list[Tensor],
    b: Tensor,
    *,
    transposed: bool,
    known: Tensor | None = None,
) -> Tensor:
    """The solution `v` of `J v = b`, or of `J' v = b`, as a function of all that they depend on.

    Args:
        equation: The equation with the Jacobian `J`.
        point: Where it is taken: the root and the arguments.
        captured: What the residual captures.
        reads: The values of the variables among these.
        b: The right-hand side.
        transposed: Whether the matrix is the transpose of `J`.
        known: The solution, if it is known.
    """
    point, captured = list(map(graphs.here, point)), list(map(graphs.here, captured))
    b = graphs.here(b)
    are_live = [structures.is_differentiable(t.dtype) for t in captured]
    if known is None:
        assert equation.solve
        fixed = [
            tf.stop_gradient(t) if is_live else t
            for t, is_live in zip(captured, are_live, strict=True)
        ]
        stopped = list(map(tf.stop_gradient, point))
        matvec = _product_with_jacobian(equation, stopped, fixed, transposed=transposed)
        b_ = tf.stop_gradient(b)
        known = tf.stop_gradient(equation.solve(matvec, b_))
        fits = adjoint.are_near(tf.norm(matvec(known) - b_), tf.norm(b_))
        known = _unless(fits, _NOT_SOLVED, known)
    v = tf.stop_gradient(graphs.here(known))

    def pull(upstream: Tensor) -> list[Gradient]:
        at, cs = list(map(tf.identity, point)), list(map(_distinct, captured))
        of_point = functools.partial(_solution, equation, at, cs, reads)
        by_b = of_point(upstream, transposed=not transposed)
        again = of_point(b, transposed=transposed, known=v)
        # J v = b: dJ v + J dv = db, and <u, J v> = <J' u, v>
        left, right = (again, by_b) if transposed else (by_b, again)
        sources = [*at, *itertools.compress(cs, are_live), *equation.r.handles]
        with tf.GradientTape(watch_accessed_variables=False) as outer:
            outer.watch(sources)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(at[0])
                r = equation.r(at, cs)
            pulled = tape.gradient(r, at[0], left)
        return [by_b, *outer.gradient(pulled, sources, output_gradients=-right)]

    inputs = [b, *point, *itertools.compress(captured, are_live), *reads]
    return keep([v], inputs, Rule(equation.name, pull))[0]


def _product_with_jacobian(
    equation: _Equation, point: list[Tensor], captured: list[Tensor], *, transposed: bool
) -> Callable[[Tensor], Tensor]:
    """The product of a vector with the Jacobian by the root, or with its transpose."""
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(point[0])
        r = equation.r(point, captured)
    if transposed:
        return lambda v: tape.gradient(r, point[0], v)
    (u,) = adjoint.far_probes([r])
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as outer:
        outer.watch(u)
        pulled = tape.gradient(r, point[0], u)
    return lambda v: outer.gradient(pulled, u, v)


class _Rows:
    """Roots of any structure as a matrix `[roots, unknowns of each]`.

    Attributes:
        stars: The leaves of the structure, stopped.
    """

    def __init__(self, x_star: Structure, batch_ndims: Ndims | None, name: str) -> None:
        self._x_star, self._name = x_star, name
        self.stars = [
            tf.stop_gradient(_floating(x, f"{name}{path}"))
            for path, x in structures.flatten(x_star)
        ]
        dtypes = sorted({x.dtype.name for x in self.stars})
        if len(dtypes) != 1:
            raise TypeError(
                f"{name} must have a single dtype, got {', '.join(dtypes) or 'no leaves'}. Cast "
                "all leaves to one dtype."
            )
        if isinstance(batch_ndims, int):
            _check_batches(self.stars, batch_ndims, name)
        of_stars = [_shape(x) for x in self.stars]
        self._count = _product(of_stars[0][:batch_ndims])
        self._sizes = [_product(shape[batch_ndims:]) for shape in of_stars]

    def pack(self, leaves: list[Tensor]) -> Tensor:
        """From leaves to rows."""
        rows = [
            tf.reshape(leaf, [self._count, size])
            for leaf, size in zip(leaves, self._sizes, strict=True)
        ]
        return rows[0] if len(rows) == 1 else tf.concat(rows, 1)

    def unpack(self, rows: Tensor) -> Structure:
        """From rows to the structure."""
        columns = [rows] if len(self._sizes) == 1 else tf.split(rows, self._sizes, 1)
        leaves = []
        for column, star in zip(columns, self.stars, strict=True):
            leaf = tf.reshape(column, tf.shape(star))
            leaf.set_shape(star.shape)
            leaves.append(leaf)
        return tf.nest.pack_sequence_as(self._x_star, leaves)

    def solving(self, solve: Function) -> Function:
        """`solve`, which works on the structure, as a function of rows."""

        def of_rows(matvec: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
            def product(v: Structure) -> Structure:
                return self.unpack(matvec(self.checked(v, "the argument of matvec")))

            return self.checked(solve(product, self.unpack(b)), "the result of solve")

        return of_rows

    def checked(self, returned: Structure, name: str) -> Tensor:
        """The residual as rows, with its structure, dtypes and shapes checked."""
        leaves = []
        pairs = structures.pair(self._x_star, returned, self._name, name)
        for star, (path, _, leaf) in zip(self.stars, pairs, strict=True):
            leaf = structures.to_tensor(leaf, name + path)
            if leaf.dtype != star.dtype:
                raise TypeError(
                    f"{name}{path} has dtype {leaf.dtype.name}, expected {star.dtype.name}, the "
                    f"dtype of {self._name}{path}."
                )
            leaves.append(structures.shaped_like(leaf, star, name + path, self._name + path))
        return self.pack(leaves)


def _check_batches(stars: list[Tensor], batch_ndims: int, name: str) -> None:
    known = [shape for shape in map(structures.static_shape, stars) if shape is not None]
    batches = [shape[:batch_ndims] for shape in known]
    if not all(len(b) == batch_ndims and shapes.compatible(b, batches[0]) for b in batches):
        raise ValueError(
            f"{name} must have the same leading batch_ndims={batch_ndims} dimensions in all "
            f"leaves, got {', '.join(map(shapes.show, known))}."
        )


def _jacobian(
    name: str, r: Callable[..., Tensor], x: Tensor, ts: list[Tensor], cs: list[Tensor]
) -> Tensor:
    """The Jacobian of each row of `r(x, ts, cs)`, `[roots, n, n]`.

    An error, when computed or when differentiated, if rows depend on each other.
    """
    j, fits = _of_rows(lambda x: r(x, ts, cs), x)
    if fits is None:
        return j
    message = _DEPENDENT.format(name)
    j = _unless(fits, message, j)

    def pull(upstream: Tensor) -> list[Gradient]:
        # At the root they may be independent to first order only.
        at = tf.stop_gradient(graphs.here(x))
        others = [list(map(graphs.here, tensors)) for tensors in (ts, cs)]
        size = tf.where(tf.equal(at, 0), tf.ones_like(at), tf.abs(at))
        _, fits = _of_rows(lambda x: r(x, *others), at + 0.1 * size * adjoint.probes([at])[0])
        assert fits is not None
        return [_unless(fits, message, upstream)]

    return keep([tf.stop_gradient(j)], [j], Rule(name, pull))[0]


def _of_rows(r: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The Jacobian of each row, and whether rows are independent, None if there is one at most."""
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(x)
        x_ = tf.identity(x)
        y = r(x_)
    n = x.shape[1]
    if x.shape[0] == 0:
        return tf.zeros([0, tf.shape(x)[1], tf.shape(x)[1]], x.dtype), None
    if n is not None and n <= 8:  # the residual is a single operation here, and so is its gradient
        unit = tf.eye(n, dtype=x.dtype)
        rows = [tape.gradient(y, x_, tf.zeros_like(y) + unit[i]) for i in range(n)]
        j = tf.stack(rows, 1)
    else:
        # pfor compiles its loop, which pays off only if that happens once.
        j = tape.batch_jacobian(y, x_, experimental_use_pfor=not tf.executing_eagerly())
    if x.shape[0] == 1:
        return j, None
    # Each column of the Jacobian is a sum over all rows: of one that is there, if they are
    # independent.
    (u,) = adjoint.probes([y])
    return j, tracing.as_one(_are_independent, j, u, tape.gradient(y, x_, u))


def _are_independent(j: Tensor, u: Tensor, pulled: Tensor) -> Tensor:
    """Whether a pullback is that of the Jacobians `j` of rows, up to half of the digits."""
    alone = tf.linalg.matvec(j, u, transpose_a=True)
    size = tf.linalg.matvec(tf.abs(j), tf.abs(u), transpose_a=True)
    return tf.reduce_all(adjoint.are_near(pulled - alone, size))


_DEPENDENT = (
    "{0} was stated to return independent equations, one system for each batch member or entry, "
    "but an equation depends on the unknowns of another member. Choose a smaller batch_ndims "
    "(with implicit_reparameterize, a larger event_ndims)."
)

_ON_HOST = (
    "{0} was differentiated with respect to something that it passes to a host call or to NumPy, "
    "where TensorFlow knows no derivative. Give the host call its own gradient with one of "
    "sgtrick's functions. If it is meant to be constant, use tf.stop_gradient of its result."
)

_ASSIGNED = (
    "{0} reads a variable that was assigned between the call and the gradient, which is that "
    "of the call. Assign the variable after the gradient, or pass it as an argument."
)

_NOT_SOLVED = (
    "solve(matvec, b) returned a v for which matvec(v) is not b, not even up to half of the digits "
    "of the dtype. Raise its number of steps, lower its tolerance, or use a method for matrices "
    "like the Jacobian of the residual and its transpose, which need not be symmetric."
)


def _inverse(j: Tensor) -> Tensor:
    """The inverses of matrices `[roots, n, n]`, NaN for those that are singular or not finite."""
    dtype = j.dtype
    work = dtype if dtype == tf.float64 else tf.float32
    j = tf.cast(j, work)
    n = tf.shape(j)[-1]
    # tf.linalg.inv raises for the whole batch if one matrix is singular, and so would
    # triangular_solve.
    size = tf.reduce_max(tf.abs(j), -1, keepdims=True)  # rows may differ in units
    q, r = tf.linalg.qr(j / size)
    pivots = tf.reduce_min(tf.abs(tf.linalg.diag_part(r)), -1)
    solvable = tf.reshape(pivots > 0, [-1, 1, 1])  # false for NaN
    r = tf.where(solvable, r, tf.eye(n, dtype=work))
    inverse = tf.linalg.triangular_solve(r, tf.linalg.matrix_transpose(q), lower=False)
    inverse /= tf.linalg.matrix_transpose(size)
    # Without abs, these terms would add up to the diagonal of inverse @ j, which is 1. If they
    # reach 1 / eps, no digit of the sum is right. Unlike a condition number, this does not depend
    # on units.
    terms = tf.reduce_sum(tf.abs(inverse * tf.linalg.matrix_transpose(j)), -1)
    terms = tf.reduce_max(terms, -1)
    lost = 8 * np.finfo(work.as_numpy_dtype).eps * terms * tf.cast(n, work)
    regular = solvable & tf.reshape(lost < 1, [-1, 1, 1])
    return tf.cast(tf.where(regular, inverse, np.nan), dtype)


def _floating(value: TensorLike, name: str) -> Tensor:
    value = structures.to_tensor(value, name)
    if not value.dtype.is_floating:
        advice = "Pass its real and imaginary parts." if value.dtype.is_complex else "Cast it."
        raise TypeError(f"{name} has dtype {value.dtype.name}, expected a floating dtype. {advice}")
    return value


def _shape(x: Tensor) -> list[int] | Tensor:
    """A list of ints if it is known, else a tensor."""
    return x.shape.as_list() if x.shape.is_fully_defined() else tf.shape(x)


def _product(dims: list[int] | Tensor) -> Ndims:
    return math.prod(dims) if isinstance(dims, list) else tf.reduce_prod(dims)
