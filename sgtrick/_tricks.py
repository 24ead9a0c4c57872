"""Gradients bent on purpose: `stop(f) + L(x - stop(x))` where `L` is not the derivative of `f`.

All of them take structures of tensors. What bends them (a mask, a factor, bounds) is one for all
leaves, or a structure like theirs.
"""

from typing import Any

import tensorflow as tf

from sgtrick._core import dtypes, formula, shapes, structures
from sgtrick._core.override import keep
from sgtrick._core.rule import Rule
from sgtrick._core.tensors import TENSORFLOW
from sgtrick._core.types import Function, Gradient, Structure, Tensor, TensorLike


def stop_gradient(x: Structure, where: Structure = None) -> Structure:
    """Stops the gradient of all entries of `x`, or of some.

    The entries are selected by `tf.where`, not by multiplying with zeros and ones, so that what
    flows back to the stopped ones is zero even where the upstream gradient is not finite.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> x = tf.constant([1.0, 2.0, 3.0])
        >>> with tf.GradientTape(persistent=True) as tape:
        ...     tape.watch(x)
        ...     by_mask = tf.reduce_sum(sgtrick.stop_gradient(x, where=x > 1.5) ** 2)
        ...     by_index = tf.reduce_sum(sgtrick.stop_gradient(x, where=0) ** 2)
        >>> tape.gradient(by_mask, x).numpy()
        array([2., 0., 0.], dtype=float32)
        >>> tape.gradient(by_index, x).numpy()
        array([0., 4., 6.], dtype=float32)

    Args:
        x: Tensor, variable, array or number of any dtype, or a structure of these.
        where: What to stop: a bool mask that broadcasts to `x`; an index as in `x[where]`, which is
            an int, a slice, `...` or a tuple of these; an int tensor, array or list of positions
            along the first axis; or None for all entries. For a structure `x`, one of these for
            all leaves, or a structure of them like `x`, in which lists and tuples are structure.

    Returns:
        The structure, dtypes and values of `x`, exact to any order. For `where=None` the result is
        unconnected, as that of `tf.stop_gradient`.

    Raises:
        TypeError: `where` is neither mask nor index.
        ValueError: The mask does not broadcast to `x`, the index is out of bounds, or the structure
            is not that of `x`.
        tf.errors.InvalidArgumentError: The same at run time, for what was unknown while tracing.
    """

    def stopped(path: str, x: Tensor, where: Structure) -> Tensor:
        name = f"x{path}"
        x = structures.to_tensor(x, name)
        if where is None:
            return tf.stop_gradient(x)
        return tf.where(_mask(where, x, name), tf.stop_gradient(x), x)

    return _map(stopped, x, where=where)


def straight_through(fx: Structure, x: Structure) -> Structure:
    """The value `fx` with the gradient of `x`, as if `fx` were the identity.

    For steps, rounding, quantised and binary layers, whose own derivative is zero almost
    everywhere: `stop(fx) + (x - stop(x))`, whose first part has no derivative and whose second part
    has no value. (Bengio, Léonard, Courville 2013, https://arxiv.org/abs/1308.3432)

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

    To let the gradient pass only where `abs(x) <= 1`, give it `tf.clip_by_value(x, -1, 1)` as `x`.

    Args:
        fx: The value: tensor, variable, array or number, floating or complex, or a structure of
            these. It is stopped.
        x: What takes the gradient: of the structure and shapes of `fx`, and complex where it is.

    Returns:
        The structure, dtypes and values of `fx`, also where `x` is not finite; there an entry's
        gradient is zero. Each leaf of `x` gets the upstream gradient in its own dtype. Second
        derivatives are zero.

    Raises:
        TypeError: A dtype without derivatives, or one of `fx` and `x` complex and the other not.
        ValueError: Structures or shapes differ.
    """
    leaves = []
    for path, x_leaf, value in structures.pair(x, fx, gx_name="fx"):
        point = _differentiable(x_leaf, f"x{path}")
        value = _differentiable(value, f"fx{path}", like=point)
        if value.dtype.is_complex != point.dtype.is_complex:
            raise TypeError(
                f"fx{path} has dtype {value.dtype.name}, x{path} {point.dtype.name}. Both must be "
                "complex, or neither."
            )
        value = structures.shaped_like(value, point, f"fx{path}", f"x{path}")
        minus_z = tf.cast(formula.minus_zero(point), value.dtype)
        leaves.append(formula.with_linear(tf.stop_gradient(value), [minus_z]))
    return tf.nest.pack_sequence_as(fx, leaves)


def scale_gradient(x: Structure, factor: Structure) -> Structure:
    """The value `x` with its gradient multiplied by `factor`.

    `stop(x) + stop(factor) * (x - stop(x))`, in which only the last `x` has a derivative.

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
        factor: Broadcasts to `x` and is cast to its dtype; for a structure `x`, one for all leaves
            or a structure like `x`. It is stopped: a scaled gradient is the derivative of nothing,
            so that none by the factor could be right. 0 stops, even an upstream gradient that is
            not finite; infinite factors leave an upstream gradient of 0 as it is.

    Returns:
        The structure, dtypes and values of `x`, also where `x` or `factor` is not finite. Where `x`
        is not, an entry's gradient is zero. Second derivatives are those of a linear function of
        slope `factor`.

    Raises:
        TypeError: A dtype without derivatives, or a complex factor of a real `x`.
        ValueError: `factor` does not broadcast to `x`, or has another structure.
    """

    def scaled(path: str, x: Tensor, factor: Structure) -> Tensor:
        name = f"x{path}"
        x = _differentiable(x, name)
        factor = TENSORFLOW.to_dtype(factor, x.dtype.name, "factor", f"{name} is {x.dtype.name}")
        factor = tf.stop_gradient(_like(factor, x, "factor", name))
        minus_z = formula.minus_zero(stop_gradient(x, where=tf.equal(factor, 0)))
        rank = tf.rank(x) if x.shape.rank is None else x.shape.rank
        return formula.with_linear(tf.stop_gradient(x), [TENSORFLOW.inner(factor, minus_z, rank)])

    return _map(scaled, x, factor=factor)


def reverse_gradient(x: Structure) -> Structure:
    """The value `x` with its gradient reversed: `stop(x) - (x - stop(x))`.

    What comes before ascends the loss that what comes after descends, as in domain-adversarial
    training. (Ganin, Lempitsky 2015, https://arxiv.org/abs/1409.7495, whose factor `lambda` is
    `scale_gradient(x, -lambda)`)

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
        As `scale_gradient(x, -1)`.

    Raises:
        TypeError: A dtype without derivatives.
    """
    return scale_gradient(x, -1)


def clip_gradient(x: Structure, lo: Structure, hi: Structure) -> Structure:
    """The value `x` with its gradient clipped, entry by entry, to `[lo, hi]`.

    What clips is the upstream gradient itself, in which clipping is not linear: no formula in
    `x - stop(x)` has such a derivative, and forward mode has no upstream gradient at all. So this
    is an override of the gradient, which holds under every other transformation.

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
        lo: Lower bound, at most `hi`. Broadcasts to `x` and is cast to its dtype; for a structure
            `x`, one for all leaves or a structure like `x`.
        hi: Upper bound, in the same manner.

    Returns:
        The structure, dtypes and values of `x`. Derivatives of higher order are those of clipping;
        with all tapes around a `tf.function` they are an error or NaN.

    Raises:
        TypeError: A dtype that is not floating.
        ValueError: A bound does not broadcast to `x`, or has another structure.
        tf.errors.InvalidArgumentError: `lo` exceeds `hi`, or is NaN.
        NotImplementedError: In forward mode.
    """

    def clipped(path: str, x: Tensor, lo: Structure, hi: Structure) -> Tensor:
        name = f"x{path}"
        x = _differentiable(x, name)
        if x.dtype.is_complex:
            raise TypeError(
                f"{name} has dtype {x.dtype.name}, and complex numbers have no order. Clip the "
                "gradients of its real and imaginary parts."
            )
        lo, hi = (
            _like(
                TENSORFLOW.to_dtype(bound, x.dtype.name, which, f"{name} is {x.dtype.name}"),
                x,
                which,
                name,
            )
            for bound, which in ((lo, "lo"), (hi, "hi"))
        )
        message = f"clip_gradient: lo must not exceed hi, where {name} is clipped."
        with tf.control_dependencies([tf.debugging.assert_less_equal(lo, hi, message=message)]):
            return _clip(tf.identity(x), lo, hi)

    return _map(clipped, x, lo=lo, hi=hi)


def magic_box(log_prob: Structure) -> Structure:
    """DiCE's operator: 1 in value, whose gradients of every order are those of the probability.

    `exp(log_prob - stop(log_prob))` is the ratio of the probability to itself: an expectation over
    samples `k` becomes `mean(magic_box(log_prob_k) * f_k)`, since `stop(p) * magic_box(log(p))` is
    `p` in value and in every derivative. `log_prob` of sample `k` holds the terms of all random
    choices that `f_k` depends on. (Foerster et al. 2018, https://arxiv.org/abs/1802.05098)

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> p = tf.constant(0.25)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(p)
        ...     draws = tf.constant([1.0, 0.0, 0.0, 0.0])
        ...     log_prob = tf.math.log(tf.where(draws > 0, p, 1 - p))
        ...     estimate = tf.reduce_mean(sgtrick.magic_box(log_prob) * draws)
        >>> float(estimate), float(tape.gradient(estimate, p))  # of the expectation p: p and 1
        (0.25, 1.0)

    Args:
        log_prob: Log probabilities or densities: tensor, variable, array or number, floating, or a
            structure of these.

    Returns:
        Ones of the structure, shapes and dtypes of `log_prob`, also where it is not finite; there
        an entry has no derivative. All is made of native ops, so that derivatives of every order
        are exact under every transformation.

    Raises:
        TypeError: A dtype that is not floating.
    """

    def boxed(path: str, log_prob: Tensor) -> Tensor:
        log_prob = _differentiable(log_prob, f"log_prob{path}")
        if log_prob.dtype.is_complex:
            raise TypeError(f"log_prob{path} has dtype {log_prob.dtype.name}, expected a real one.")
        return tf.exp(-formula.minus_zero(log_prob, guard=True))

    return _map(boxed, log_prob)


_FORWARD = (
    "clip_gradient clips the gradient that flows back, so it has no derivative in forward mode: "
    "use reverse mode (tf.GradientTape)."
)


def _clip(x: Tensor, lo: Structure, hi: Structure) -> Tensor:
    def pull(upstream: Tensor) -> list[Gradient]:
        # An upstream of IndexedSlices may hold an entry in several parts: their sum is clipped.
        upstream = tf.convert_to_tensor(upstream)
        g = tf.clip_by_value(upstream, lo, hi)
        return [tf.where(tf.equal(upstream, upstream), g, upstream)]  # some XLAs clip NaN too

    rule = Rule("clip_gradient", pull, _FORWARD, lost=[False])
    return keep([x], [x], rule)[0]


def _map(f: Function, x: Structure, **options: Any) -> Structure:
    """Returns `f(path, leaf, *options)` in the structure of `x`."""
    leaves = list(structures.flatten(x))
    columns = [
        [o for _, _, o in structures.pair(x, option, gx_name=name)]
        if tf.nest.is_nested(x) and tf.nest.is_nested(option)
        else [option] * len(leaves)
        for name, option in options.items()
    ]
    mapped = [f(*leaf, *of_leaf) for leaf, *of_leaf in zip(leaves, *columns, strict=True)]
    return tf.nest.pack_sequence_as(x, mapped)


def _differentiable(value: TensorLike, name: str, like: Tensor | None = None) -> Tensor:
    """A tensor that has derivatives; a bare Python float takes the precision of `like`."""
    dtype = like.dtype if like is not None and type(value) is float else None
    value = structures.to_tensor(value, name, dtype=dtype)
    dtypes.check_differentiable(value.dtype.name, name)
    return value


def _mask(where: Structure, x: Tensor, name: str) -> Tensor:
    """The bool mask, of the shape of `x`, that a mask or index means."""
    if type(where) is int or isinstance(where, (slice, tuple, type(...))):
        return _mask_of_index(where, x, name)
    where = structures.to_tensor(where, "where")
    if where.dtype == tf.bool:
        return _like(where, x, "where", name)
    if where.dtype.is_integer:
        return _mask_of_index(where, x, name)
    raise TypeError(
        f"where has dtype {where.dtype.name}. Pass a bool mask, or an index: an int, a slice, ... "
        "or a tuple of these, or a tensor of ints."
    )


def _mask_of_index(index: Any, x: Tensor, name: str) -> Tensor:
    if isinstance(index, tuple) and any(isinstance(i, bool) for i in index):
        raise TypeError(f"where={index!r}: an index is no bool. Pass a mask as a list or tensor.")
    positions = tf.reshape(tf.range(tf.size(x)), tf.shape(x))
    try:
        if tf.is_tensor(index):
            n = tf.cast(tf.shape(x)[0], index.dtype)
            there = tf.reduce_all((-n <= index) & (index < n))
            message = f"where is out of bounds for {name}. Their shapes, in this order:"
            index = structures.checked(there, index, message, x)
            chosen = tf.gather(positions, tf.where(index < 0, index + n, index))
        else:
            chosen = positions[index]
    except (TypeError, ValueError, IndexError, tf.errors.InvalidArgumentError) as error:
        shape = shapes.show(structures.static_shape(x))
        raise ValueError(f"where is no index of {name}, of shape {shape}: {error}") from error
    chosen = tf.reshape(chosen, [-1, 1])
    nowhere, true = tf.fill([tf.size(x)], False), tf.fill([tf.size(chosen)], True)
    return tf.reshape(tf.tensor_scatter_nd_update(nowhere, chosen, true), tf.shape(x))


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
    # Where the rank of x is unknown, broadcast_to claims the static shape of what it was given.
    return tf.reshape(tf.broadcast_to(value, tf.shape(x)), tf.shape(x))
