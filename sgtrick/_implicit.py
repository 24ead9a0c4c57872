"""Values defined by an equation: roots of a residual, and samples via their distribution function.

However such a value was computed, its derivatives follow from the equation.
"""

from __future__ import annotations  # signatures that show the names of types

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from sgtrick._arguments import shapes, structures
from sgtrick._core import adjoint, unknown
from sgtrick._core.guard import LIST
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._tensorflow import autograph, connections, graphs, tapes, tracing
from sgtrick._types import Function, Gradient, Ndims, Pullback, Structure, Tensor, TensorLike


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
            when the function runs; around it and in XLA, the derivative is NaN.
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
    sample = _floating(sample, "sample", tf.nest.flatten(params))
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
    flat = tf.nest.flatten(theta)
    rows = _Rows(x_star, batch_ndims, x_name, flat)
    # What holds tensors is passed on: the residual closes over these.
    places = [
        i
        for i, t in enumerate(flat)
        if structures.has_derivatives(t) and not structures.holds_tensors(t)
    ]

    def of_rows(x: Tensor, *thetas: Tensor) -> Tensor:
        others = list(flat)
        for i, t in zip(places, thetas, strict=True):
            others[i] = t
        returned = residual(rows.unpack(x), *tf.nest.pack_sequence_as(theta, others))
        return rows.checked(returned, f"the result of {name}")

    x = rows.pack(rows.stars)
    paths = [f"{theta_name}{path}" for path, _ in structures.flatten(theta)]
    beside = [*rows.stars, *flat]
    thetas = [graphs.here(structures.to_tensor(flat[i], paths[i], beside=beside)) for i in places]

    def outlined(*at: Tensor) -> list[Tensor]:
        with graphs.thrown_away():
            return [of_rows(*at)]

    outline = tracing.Outline(outlined, [x, *thetas])
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
    n, handles = len(thetas), outline.handles

    def r(x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """The residual as a function of everything that it depends on."""
        y, reads = of_rows(x, *inputs[:n]), inputs[n + len(closed) :]
        if not reads:
            return y
        are_unchanged = unknown.are_equal(list(map(graphs.read, handles)), reads)
        return _unless(are_unchanged, _ASSIGNED.format(name), y)

    solve_rows = rows.solving(solve) if solve else functools.partial(_eliminated, name)
    varying = connections.varying(outline.captured, outline.inner)
    calls_host = connections.Subgraph(outcome).host_sees([*outline.inputs, *varying])
    # The caller's solve may use any tensor, and the residual some that are no inputs of a rule.
    is_local = solve is None and all(graphs.operation(t) is None for t in outline.captured)
    equation = _Equation(name, r, [*closed, *handles], calls_host, solve_rows, is_local)
    reads = list(map(tapes.read, handles))
    return rows.unpack(_solution(equation, x, [*thetas, *closed, *reads]))


class _Equation(NamedTuple):
    """`r(x, inputs) = 0`, where `x` is a matrix of rows.

    Attributes:
        name: The function's name in errors.
        r: The residual. The last of its inputs are what it closes over, and uses itself.
        closed: The same, with the handles of variables instead of their values.
        calls_host: Whether a host call makes the residual of something that may be differentiated.
        solve: From the product of vectors with a matrix, and `b`, to the solution of a system.
        is_local: See `Rule`.
    """

    name: str
    r: Callable[[Tensor, Sequence[Tensor]], Tensor]
    closed: Sequence[Tensor]
    calls_host: bool
    solve: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    is_local: bool

    def rule(self, pull: Pullback) -> Rule:
        """The rule of a solution."""
        return Rule(self.name, pull, is_local=self.is_local)

    def sources(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What tapes differentiate with respect to: the inputs, or what `r` uses itself."""
        return [*inputs[: len(inputs) - len(self.closed)], *self.closed]

    def by_x(self, x: Tensor, inputs: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
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
            return list(unknown.failures(inputs, _ON_HOST.format(equation.name), [u]))
        # Copies: the same tensor may be several inputs, whose gradients are different ones.
        at = list(map(tf.identity, inputs))
        root = _solution(equation, x, at)
        w = _linear(equation, _solved(equation, u, root, at), u, root, at)
        sources = equation.sources(at)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tapes.watch(tape, sources)
            r = equation.r(root, at)
        return list(tape.gradient(r, sources, w))

    (solution,) = keep([tf.stop_gradient(x)], inputs, equation.rule(pull))
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
        sources = [at_x, *equation.sources(at)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tapes.watch(tape, sources)
            pulled = equation.by_x(at_x, at)(left)
        return [v, *tape.gradient(pulled, sources, right)]

    (solution,) = keep([tf.stop_gradient(w)], [u, x, *inputs], equation.rule(pull))
    return solution


def _solved(
    equation: _Equation,
    u: Tensor,
    x: Tensor,
    inputs: Sequence[Tensor],
    *,
    transposed: bool = True,
) -> Tensor:
    """The same solution without derivatives."""
    u, x, *inputs = map(tf.stop_gradient, [u, x, *inputs])
    by_x = equation.by_x(x, inputs)
    if transposed:
        return tf.stop_gradient(equation.solve(by_x, -u))
    (v,) = adjoint.far_probes([u])
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(v)
        pulled = by_x(v)
    return tf.stop_gradient(equation.solve(lambda w: tape.gradient(pulled, v, w), -u))


def _unless(holds: Tensor, message: str, t: Tensor) -> Tensor:
    """`t`, or an error with this message, or NaN, if `holds` is false."""
    zero = tf.cast(unknown.zero_if(holds, message, []), t.dtype)
    # Also a factor, so that the derivatives are NaN too; not only, since TensorFlow's optimizer may
    # take the product of a constant 0 and NaN for 0.
    return t * (1 + zero) + zero


def _eliminated(name: str, product: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
    """The solution of one system for each row of `b`, by the matrices that products make up.

    A column is found for all rows at once. If these are not independent, it is a sum over several
    matrices, and the solution does not satisfy the system.
    """

    def column(unit: Tensor) -> Tensor:
        return product(tf.zeros_like(b) + unit)

    n = b.shape.as_list()[1]
    if n == 0:
        return b
    units = tf.eye(tf.shape(b)[1] if n is None else n, dtype=b.dtype)
    # Tracing a loop over columns pays off only where it happens once, and if they are many.
    if n is not None and (n <= 8 or tf.executing_eagerly()):
        columns = tf.stack(list(map(column, tf.unstack(units))), -1)
    else:
        columns = tf.transpose(tf.vectorized_map(column, units), [1, 2, 0])
    v = tf.linalg.matvec(_inverse(columns), b)
    if b.shape.as_list()[0] == 1:
        return v
    size = tf.linalg.matvec(tf.abs(columns), tf.abs(v)) + tf.abs(b)
    fits = tf.reduce_all(adjoint.are_near(product(v) - b, size))
    return _unless(fits, _DEPENDENT.format(name), v)


class _Rows:
    """Roots of any structure as a matrix `[roots, unknowns of each]`.

    Attributes:
        stars: The leaves of the structure, stopped.
    """

    def __init__(
        self, x_star: Structure, batch_ndims: Ndims, name: str, theta: Sequence[object]
    ) -> None:
        self._x_star, self._name = x_star, name
        leaves = list(structures.flatten(x_star))
        beside = [x for _, x in leaves if hasattr(x, "dtype")] or theta
        self.stars = [tf.stop_gradient(_floating(x, f"{name}{path}", beside)) for path, x in leaves]
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

    def pack(self, leaves: Sequence[Tensor]) -> Tensor:
        """From leaves to rows."""
        pairs = zip(leaves, self._sizes, strict=True)
        return tf.concat([tf.reshape(leaf, [self._count, size]) for leaf, size in pairs], 1)

    def unpack(self, rows: Tensor) -> Structure:
        """From rows to the structure."""
        leaves = []
        columns = tf.split(rows, self._sizes, 1)
        for column, star in zip(columns, self.stars, strict=True):
            leaf = tf.reshape(column, tf.shape(star))
            leaf.set_shape(star.shape)
            leaves.append(leaf)
        return tf.nest.pack_sequence_as(self._x_star, leaves)

    def checked(self, returned: Structure, name: str) -> Tensor:
        """What a caller's function returned as rows, if it is like the roots."""
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

    def solving(self, solve: Function) -> Function:
        """The caller's `solve` of the structure as a function of rows, with a test."""

        def of_rows(product: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
            def matvec(v: Structure) -> Structure:
                return self.unpack(product(self.checked(v, "the argument of matvec")))

            v = self.checked(solve(matvec, self.unpack(b)), "the result of solve")
            return _unless(self._solves(v, product, b), _NOT_SOLVED, v)

        return of_rows

    def _solves(self, v: Tensor, product: Callable[[Tensor], Tensor], b: Tensor) -> Tensor:
        """Whether `v` solves each system that `b` consists of, up to half of the digits.

        One norm over several systems would not see what is wrong with a small one. These are
        systems of their own if `v`, with each part multiplied by another number, has a product in
        which each part is multiplied by its number.
        """
        image = product(v)
        holds = _near(self._parts(image - b, 0), self._parts(b, 0))
        for ndims, by_leaf in self._divisions():
            scaled = self._scaled(image, ndims, by_leaf=by_leaf)
            moved = product(self._scaled(v, ndims, by_leaf=by_leaf)) - scaled
            error, size, moved, scaled = (
                self._parts(t, ndims, by_leaf=by_leaf) for t in (image - b, b, moved, scaled)
            )
            holds &= _near(error, size) | ~_near(moved, scaled)
        return holds

    def _divisions(self) -> list[tuple[int, bool]]:
        """Ways to divide the unknowns: by how many leading dimensions, and whether by leaves."""
        known = [structures.static_shape(star) or () for star in self.stars]
        if len(known) == 1:
            return [(ndims + 1, False) for ndims in range(len(known[0]))]
        by_leaf = [(ndims, True) for ndims in range(min(map(len, known)) + 1)]
        alike = [None not in n and len(set(n)) == 1 for n in zip(*known, strict=False)]
        common = itertools.takewhile(bool, alike)
        return [*by_leaf, *((ndims, False) for ndims, _ in enumerate(common, 1))]

    def _scaled(self, rows: Tensor, ndims: int, *, by_leaf: bool) -> Tensor:
        """Rows with each part multiplied by another number."""
        leaves = tf.nest.flatten(self.unpack(rows))
        likes = [tf.zeros(tf.shape(leaf)[:ndims], leaf.dtype) for leaf in leaves]
        factors = adjoint.probes(likes) if by_leaf else [adjoint.probes([t])[0] for t in likes]

        def scaled(leaf: Tensor, factor: Tensor) -> Tensor:
            ones = tf.ones([tf.rank(leaf) - ndims], tf.int32)
            return leaf * tf.reshape(factor, tf.concat([tf.shape(factor), ones], 0))

        return self.pack(list(map(scaled, leaves, factors)))

    def _parts(self, rows: Tensor, ndims: int, *, by_leaf: bool = False) -> list[Tensor]:
        """For each part, the numbers in it, along the last dimension."""
        leaves = tf.nest.flatten(self.unpack(rows))
        flat = [tf.reshape(t, tf.concat([tf.shape(t)[:ndims], [-1]], 0)) for t in leaves]
        return flat if by_leaf else [tf.concat(flat, -1)]


def _near(differences: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
    """Whether the norms of differences are rounding, beside those of numbers.

    Norms are along the last dimension.
    """

    def norms(t: Tensor, unit: Tensor) -> Tensor:
        return tf.norm(structures.wide(t / unit), axis=-1)

    fits = []
    for difference, of in zip(differences, numbers, strict=True):
        # In units of the largest number, since squares of small ones are zero.
        largest = tf.reduce_max(tf.abs(of), -1, keepdims=True)
        unit = tf.where(largest > 0, largest, tf.ones_like(largest))
        ratio = tf.cast(norms(difference, unit) / norms(of, unit), of.dtype)
        fits.append(tf.reduce_all(adjoint.are_near(ratio, tf.ones_like(ratio))))
    return tf.reduce_all(tf.stack(fits))


def _check_batches(stars: list[Tensor], batch_ndims: int, name: str) -> None:
    known = [shape for shape in map(structures.static_shape, stars) if shape is not None]
    batches = [shape[:batch_ndims] for shape in known]
    if not all(len(b) == batch_ndims and shapes.compatible(b, batches[0]) for b in batches):
        raise ValueError(
            f"{name} must have the same leading batch_ndims={batch_ndims} dimensions in all "
            f"leaves, got {', '.join(map(shapes.show, known))}."
        )


def _check_ndims(ndims: int, name: str) -> None:
    if not shapes.is_int(ndims) or ndims < 0:
        raise ValueError(f"{name} must be an int of at least 0, got {shapes.show_option(ndims)}.")


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
    "of the dtype: in all, or for a part that is a system of its own, such as a member of a batch. "
    "Raise its number of steps, lower its tolerance, make it relative to the b of each part, or "
    "use a method for matrices like the Jacobian of the residual and its transpose, which need not "
    "be symmetric."
)


def _inverse(j: Tensor) -> Tensor:
    """The inverses of matrices `[roots, n, n]`, NaN for those that are singular or not finite."""
    if j.shape.as_list()[-1] == 1:
        return tf.where(tf.math.is_finite(j) & tf.not_equal(j, 0), 1 / j, np.nan)
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


def _floating(value: TensorLike, name: str, beside: Sequence[object]) -> Tensor:
    value = structures.to_tensor(value, name, beside=beside)
    if not value.dtype.is_floating:
        advice = "Pass its real and imaginary parts." if value.dtype.is_complex else "Cast it."
        raise TypeError(f"{name} has dtype {value.dtype.name}, expected a floating dtype. {advice}")
    return value


def _shape(x: Tensor) -> list[int] | Tensor:
    """A list of ints if it is known, else a tensor."""
    return x.shape.as_list() if x.shape.is_fully_defined() else tf.shape(x)


def _product(dims: list[int] | Tensor) -> Ndims:
    return math.prod(dims) if isinstance(dims, list) else tf.reduce_prod(dims)
