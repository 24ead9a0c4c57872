"""Modified gradients: `stop(f) + L(x - stop(x))` where `L` is not the derivative of `f`.

All functions take structures of tensors. Their other arguments (a mask, a factor, bounds) apply to
all leaves, or are structures like `x`.
"""

from __future__ import annotations  # signatures that show the names of types

import tensorflow as tf

from sgtrick._arguments import dtypes, shapes, structures
from sgtrick._arguments.tensors import TENSORFLOW
from sgtrick._core import formula
from sgtrick._core.kept import with_derivatives
from sgtrick._core.rule import Stated
from sgtrick._tensorflow.autograph import unconverted
from sgtrick._types import Function, Gradient, Structure, Tensor, TensorLike


@unconverted
def stop_gradient(x: Structure, where: Structure = None) -> Structure:
    """Stops the gradient of all entries of `x`, or of some.

    The entries are selected by `tf.where`, not by multiplying with zeros and ones, so the gradient
    of stopped entries is zero even where the upstream gradient is not finite.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> x = tf.constant([1.0, 2.0, 3.0])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = tf.reduce_sum(sgtrick.stop_gradient(x, where=x > 1.5) ** 2)
        >>> tape.gradient(y, x).numpy()
        array([2., 0., 0.], dtype=float32)

    Args:
        x: Tensor, variable, array or number of any dtype, or a structure of these.
        where: The entries to stop: a bool mask that broadcasts to `x`, or None for all entries. If
            `x` is a structure, one mask for all leaves, or a structure of masks like `x`; lists and
            tuples then count as structure.

    Returns:
        The structure, dtypes and values of `x`, with exact derivatives of every order. For
        `where=None` the result is unconnected, like that of `tf.stop_gradient`.

    Raises:
        TypeError: `where` is not a bool mask, but an index, for example.
        ValueError: The mask does not broadcast to `x`, or the structure is not that of `x`.
        tf.errors.InvalidArgumentError: At run time, the mask does not broadcast, if the shapes were
            unknown while tracing.
    """

    def stopped(path: str, x: Tensor, where: Structure) -> Tensor:
        name = f"x{path}"
        x = structures.to_tensor(x, name)
        if where is None:
            return tf.stop_gradient(x)
        return tf.where(_mask(where, x, name), tf.stop_gradient(x), x)

    return _map(stopped, x, where=where)


@unconverted
def straight_through(fx: Structure, x: Structure) -> Structure:
    """The value `fx` with the gradient of `x`, as if `fx` were the identity.

    For steps, rounding, quantised and binary layers, whose own derivative is zero almost
    everywhere: `stop(fx) + (x - stop(x))`, where the first term has zero derivative and the second
    term has zero value. (Bengio, Léonard, Courville 2013, https://arxiv.org/abs/1308.3432)

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> x = tf.constant([0.7, 1.6])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = sgtrick.straight_through(tf.round(x), x)
        >>> y.numpy()
        array([1., 2.], dtype=float32)
        >>> tape.gradient(y, x).numpy()
        array([1., 1.], dtype=float32)

    To let the gradient pass only where `abs(x) <= 1`, pass `tf.clip_by_value(x, -1, 1)` as `x`.

    Args:
        fx: The value: tensor, variable, array or number, floating or complex, or a structure of
            these. It is stopped.
        x: Gets the gradient. It has the structure and shapes of `fx`, and is complex if `fx` is.

    Returns:
        The structure, dtypes and values of `fx`, even where `x` is not finite; the gradient of such
        an entry is zero. Each leaf of `x` gets the upstream gradient in its own dtype. Second
        derivatives are zero.

    Raises:
        TypeError: A dtype has no derivatives, or only one of `fx` and `x` is complex.
        ValueError: Structures or shapes differ.
    """
    leaves = []
    for path, value, x_leaf in structures.pair(fx, x, "fx", "x"):
        point = _differentiable(x_leaf, f"x{path}")
        value = _differentiable(value, f"fx{path}", like=point)
        if value.dtype.is_complex != point.dtype.is_complex:
            raise TypeError(
                f"fx{path} has dtype {value.dtype.name}, x{path} {point.dtype.name}. Both must be "
                "complex, or neither."
            )
        value = structures.shaped_like(value, point, f"fx{path}", f"x{path}")
        minus_z = formula.minus_zero(point)
        if point.dtype != value.dtype:
            minus_z = tf.cast(minus_z, value.dtype)
        leaves.append(formula.with_linear(tf.raw_ops.StopGradient(input=value), [minus_z]))
    return structures.pack_as(fx, leaves)


@unconverted
def scale_gradient(x: Structure, factor: Structure) -> Structure:
    """The value `x` with its gradient multiplied by `factor`.

    This is `stop(x) + stop(factor) * (x - stop(x))`, where only the unstopped `x` has a derivative.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> x = tf.constant([1.0, 2.0])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = sgtrick.scale_gradient(x, 0.5) ** 2
        >>> tape.gradient(y, x).numpy()
        array([1., 2.], dtype=float32)

    Args:
        x: Tensor, variable, array or number, floating or complex, or a structure of these.
        factor: Broadcasts to `x` and is cast to its dtype; if `x` is a structure, one factor for
            all leaves or a structure like `x`. It is stopped: a scaled gradient is not the
            derivative of any function, so no gradient with respect to the factor would be right. 0
            stops even an upstream gradient that is not finite; an infinite factor leaves an
            upstream gradient of 0 unchanged.

    Returns:
        The structure, dtypes and values of `x`, even where `x` or `factor` is not finite. The
        gradient of an entry of `x` that is not finite is zero. Second derivatives are those of a
        linear function with slope `factor`.

    Raises:
        TypeError: A dtype has no derivatives, or the factor of a real `x` is complex.
        ValueError: `factor` does not broadcast to `x`, or has another structure.
    """

    def scaled(path: str, x: Tensor, factor: Structure) -> Tensor:
        name = f"x{path}"
        x = _differentiable(x, name)
        factor = tf.stop_gradient(_cast_like(factor, x, "factor", name))
        minus_z = formula.minus_zero(stop_gradient(x, where=tf.equal(factor, 0)))
        rank = tf.rank(x) if x.shape.rank is None else x.shape.rank
        return formula.with_linear(tf.stop_gradient(x), [TENSORFLOW.inner(factor, minus_z, rank)])

    return _map(scaled, x, factor=factor)


@unconverted
def reverse_gradient(x: Structure) -> Structure:
    """The value `x` with its gradient reversed: `stop(x) - (x - stop(x))`.

    The layers before it ascend the loss that the layers after it descend, as in domain-adversarial
    training. (Ganin, Lempitsky 2015, https://arxiv.org/abs/1409.7495; their layer with the factor
    `lambda` is `scale_gradient(x, -lambda)`)

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> x = tf.constant([1.0, 2.0])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = sgtrick.reverse_gradient(x) ** 2
        >>> tape.gradient(y, x).numpy()
        array([-2., -4.], dtype=float32)

    Args:
        x: Tensor, variable, array or number, floating or complex, or a structure of these.

    Returns:
        The same as `scale_gradient(x, -1)`.

    Raises:
        TypeError: A dtype has no derivatives.
    """
    return scale_gradient(x, -1)


@unconverted
def clip_gradient(x: Structure, lo: Structure, hi: Structure) -> Structure:
    """The value `x` with its gradient clipped, entry by entry, to `[lo, hi]`.

    Clipping acts on the upstream gradient and is not linear in it, so no formula in `x - stop(x)`
    has such a derivative, and forward mode, which has no upstream gradient, is not supported. All
    other transformations are.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> x = tf.constant([1.0, 20.0, -20.0])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = sgtrick.clip_gradient(x, -10, 10) ** 2
        >>> tape.gradient(y, x).numpy()
        array([  2.,  10., -10.], dtype=float32)

    Args:
        x: Tensor, variable, array or number, floating, or a structure of these.
        lo: Lower bound, at most `hi`. Broadcasts to `x` and is cast to its dtype; if `x` is a
            structure, one bound for all leaves or a structure like `x`.
        hi: Upper bound, likewise.

    Returns:
        The structure, dtypes and values of `x`. Higher derivatives are those of clipping; if all
        tapes are around a `tf.function`, they are an error or NaN.

    Raises:
        TypeError: A dtype is not floating.
        ValueError: A bound does not broadcast to `x`, or has another structure.
        tf.errors.InvalidArgumentError: `lo` exceeds `hi`, or is NaN.
        NotImplementedError: In forward mode.
    """

    def clipped(path: str, x: Tensor, lo: Structure, hi: Structure) -> Tensor:
        name = f"x{path}"
        x = _real(x, name)
        lo, hi = _cast_like(lo, x, "lo", name), _cast_like(hi, x, "hi", name)
        message = f"clip_gradient: lo must not exceed hi (for {name})."
        with tf.control_dependencies([tf.debugging.assert_less_equal(lo, hi, message=message)]):
            return _clip(tf.identity(x), lo, hi)

    return _map(clipped, x, lo=lo, hi=hi)


@unconverted
def magic_box(log_prob: Structure) -> Structure:
    """DiCE's operator: the value is 1, and score-function gradients of every order are exact.

    This is `exp(log_prob - stop(log_prob))`, the ratio of the probability to its value. An
    expectation is estimated from samples `k` by `mean(magic_box(log_prob_k) * f_k)`, since
    `stop(p) * magic_box(log(p))` has the value and all derivatives of `p`. The `log_prob` of sample
    `k` has to contain all random choices that `f_k` depends on. (Foerster et al. 2018,
    https://arxiv.org/abs/1802.05098)

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> p = tf.constant(0.25)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(p)
        ...     draws = tf.constant([1.0, 0.0, 0.0, 0.0])
        ...     log_prob = tf.math.log(tf.where(draws > 0, p, 1 - p))
        ...     estimate = tf.reduce_mean(sgtrick.magic_box(log_prob) * draws)
        >>> float(estimate), float(tape.gradient(estimate, p))  # the expectation is p
        (0.25, 1.0)

    Args:
        log_prob: Log probabilities or densities: tensor, variable, array or number, floating, or a
            structure of these.

    Returns:
        Ones of the structure, shapes and dtypes of `log_prob`, even where it is not finite; such an
        entry gets no gradient. It consists of native ops, so derivatives of every order are exact
        under every transformation.

    Raises:
        TypeError: A dtype is not floating.
    """

    def boxed(path: str, log_prob: Tensor) -> Tensor:
        log_prob = _real(log_prob, f"log_prob{path}")
        return tf.exp(-formula.minus_zero(log_prob, without_nan=True))

    return _map(boxed, log_prob)


_FORWARD = (
    "clip_gradient clips the upstream gradient, so it has no derivative in forward mode. Use "
    "reverse mode (tf.GradientTape)."
)


def _clip(x: Tensor, lo: Structure, hi: Structure) -> Tensor:
    def pull(upstream: Tensor) -> list[Gradient]:
        # IndexedSlices may hold several parts of an entry, whose sum is to be clipped.
        upstream = tf.convert_to_tensor(upstream)
        g = tf.clip_by_value(upstream, lo, hi)
        # Keeps NaN, which some XLA backends clip too.
        return [tf.where(tf.equal(upstream, upstream), g, upstream)]

    rule = Stated("clip_gradient", pull, _FORWARD)
    return with_derivatives([x], [x], rule)[0]


def _map(f: Function, x: Structure, **options: Structure) -> Structure:
    """Returns `f(path, leaf, *options)` in the structure of `x`."""
    leaves = list(structures.flatten(x))
    columns = [
        [o for _, _, o in structures.pair(x, option, gx_name=name)]
        if tf.nest.is_nested(x) and tf.nest.is_nested(option)
        else [option] * len(leaves)
        for name, option in options.items()
    ]
    mapped = [f(*leaf, *of_leaf) for leaf, *of_leaf in zip(leaves, *columns, strict=True)]
    return structures.pack_as(x, mapped)


def _differentiable(value: TensorLike, name: str, like: Tensor | None = None) -> Tensor:
    """A tensor that has derivatives; a bare Python float takes the precision of `like`."""
    dtype = like.dtype if like is not None and type(value) is float else None
    value = structures.to_tensor(value, name, dtype=dtype)
    dtypes.check_differentiable(value.dtype.name, name)
    return value


def _real(value: TensorLike, name: str) -> Tensor:
    value = _differentiable(value, name)
    if value.dtype.is_complex:
        raise TypeError(
            f"{name} has dtype {value.dtype.name}, expected a real floating dtype. Pass its real "
            "and imaginary parts."
        )
    return value


def _mask(where: Structure, x: Tensor, name: str) -> Tensor:
    """A bool mask of the shape of `x`."""
    if isinstance(where, (slice, type(...))):
        raise TypeError(_NO_MASK.format(repr(where)))
    where = structures.to_tensor(where, "where")
    if where.dtype != tf.bool:
        raise TypeError(_NO_MASK.format(f"dtype {where.dtype.name}"))
    return _like(where, x, "where", name)


_NO_MASK = (
    "where must be a bool mask that broadcasts to x, got {}. For an index i, build the mask: "
    "mask = np.zeros(x.shape, bool); mask[i] = True."
)


def _cast_like(value: TensorLike, x: Tensor, name: str, x_name: str) -> Tensor:
    """Returns `value` in the dtype and shape of `x`."""
    value = TENSORFLOW.to_dtype(value, x.dtype.name, name, f"{x_name} is {x.dtype.name}")
    return _like(value, x, name, x_name)


def _like(value: Tensor, x: Tensor, name: str, x_name: str) -> Tensor:
    """Returns `value` in the shape of `x`."""
    try:
        fits = tf.broadcast_static_shape(value.shape, x.shape).is_compatible_with(x.shape)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} has shape {shapes.show(structures.static_shape(value))}, which does not "
            f"broadcast to that of {x_name}, {shapes.show(structures.static_shape(x))}."
        )
    # If the rank of x is unknown, broadcast_to keeps the static shape of its input.
    return tf.reshape(tf.broadcast_to(value, tf.shape(x)), tf.shape(x))
