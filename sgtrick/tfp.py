"""Log densities, including those of host engines, as TensorFlow Probability distributions.

`Factor` adds a term to a joint distribution, `LogDensity` turns a function into a distribution.
Both keep any custom derivatives: nothing here stops or recomputes a gradient.
"""

from __future__ import annotations  # signatures that show the names of types

import contextlib
import numbers
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeAlias

import tensorflow as tf
import tensorflow_probability as tfp
from tensorflow_probability import bijectors as tfb
from tensorflow_probability import distributions as tfd

from sgtrick._arguments import shapes, structures
from sgtrick._types import DType, DTypeLike, Function, Kwargs, Tensor, TensorLike

__all__ = ["Factor", "LogDensity"]

Seed: TypeAlias = int | Tensor | None


class Factor(tfd.AutoCompositeTensorDistribution):  # type: ignore[misc]
    """A term of a joint log density: PyMC's `Potential`, NumPyro's `factor`.

    A distribution whose only possible value is the empty vector, with `log_prob` equal to
    `log_factor`. In a joint distribution it adds this to the log density, which is then generally
    not normalised. Its derivatives of every order are those of `log_factor`.

        >>> import tensorflow as tf
        >>> import tensorflow_probability as tfp
        >>> import sgtrick.tfp
        >>> tfd = tfp.distributions
        >>> @tfd.JointDistributionCoroutineAutoBatched
        ... def model():
        ...     x = yield tfd.Normal(0.0, 1.0, name="x")
        ...     yield sgtrick.tfp.Factor(-0.5 * (x - 3.0) ** 2, name="likelihood")
        >>> posterior = model.experimental_pin(likelihood=tf.zeros([0]))
        >>> x = tf.constant([0.0, 1.5])
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x)
        ...     y = posterior.unnormalized_log_prob(x)
        >>> tape.gradient(y, x).numpy()
        array([3., 0.], dtype=float32)

    The event has shape `[0]` and the dtype of `log_factor`. `sample` returns it, so joint
    distributions can be sampled as if the factor were not there, and their values hold it in the
    factor's place. Pinning it is optional: samplers carry the empty part along.

    Args:
        log_factor: The log of the factor, a floating tensor, variable or number. Its shape is the
            batch shape.
        validate_args: As in all distributions. There are no arguments to validate.
        allow_nan_stats: As in all distributions.
        name: The name of the part in joint distributions, and of operations.

    Raises:
        TypeError: `log_factor` does not have a floating dtype.
        ValueError: In `log_prob`, if the value is not empty.
    """

    def __init__(
        self,
        log_factor: TensorLike,
        validate_args: bool = False,
        allow_nan_stats: bool = True,
        name: str = "Factor",
    ) -> None:
        parameters = dict(locals())
        with tf.name_scope(name) as name:
            value: Tensor = log_factor
            if not _is_reference(log_factor):
                dtype = tf.float32 if type(log_factor) is int else None
                value = structures.to_tensor(log_factor, "log_factor", dtype=dtype)
            dtype = tf.as_dtype(value.dtype)
            if not dtype.is_floating:
                raise TypeError(
                    f"log_factor has dtype {dtype.name}, expected a floating dtype. Cast it."
                )
            self._log_factor = value
            super().__init__(
                dtype=dtype,
                # The sample is a constant, so pathwise gradients through it are exact.
                reparameterization_type=tfd.FULLY_REPARAMETERIZED,
                validate_args=validate_args,
                allow_nan_stats=allow_nan_stats,
                parameters=parameters,
                name=name,
            )

    @classmethod
    def _parameter_properties(cls, dtype: DType, num_classes: int | None = None) -> Kwargs:
        del dtype, num_classes
        return {"log_factor": tfp.util.ParameterProperties()}

    @property
    def log_factor(self) -> Tensor:
        """The log of the factor."""
        return self._log_factor

    def _event_shape(self) -> tf.TensorShape:
        return tf.TensorShape([0])

    def _event_shape_tensor(self) -> Tensor:
        return tf.constant([0])

    def _log_prob(self, x: Tensor) -> Tensor:
        message = (
            f"{self.name!r} is a factor, whose event is empty, so its value must have a shape "
            "[..., 0] such as tf.zeros([0]), got"
        )
        if not x.shape[-1:].is_compatible_with([0]):
            raise ValueError(f"{message} {_shown(x.shape)}.")
        if not x.shape[-1:].is_fully_defined():
            x = structures.checked(tf.reduce_all(tf.equal(tf.shape(x)[-1:], [0])), x, message)
        # The sum over nothing is zero. It has the sample shape, and gives x a gradient.
        return self._log_factor + tf.reduce_sum(tf.cast(x[..., :0], self.dtype), -1)

    def _sample_n(self, n: int | Tensor, seed: Seed = None) -> Tensor:
        del seed
        return tf.zeros(tf.concat([[n], self.batch_shape_tensor(), [0]], 0), self.dtype)

    def _default_event_space_bijector(self) -> tfb.Bijector:
        return tfb.Identity(validate_args=self.validate_args)


class LogDensity(tfd.Distribution):  # type: ignore[misc]
    """A distribution given by its log density, which need not be normalised.

        >>> import tensorflow as tf
        >>> import tensorflow_probability as tfp
        >>> import sgtrick.tfp
        >>> half_normal = sgtrick.tfp.LogDensity(
        ...     lambda x: -0.5 * tf.reduce_sum(x**2, -1), [2], tf.float32, tfp.bijectors.Softplus()
        ... )
        >>> half_normal.log_prob([[1.0, 1.0], [2.0, 2.0]]).numpy()
        array([-1., -4.], dtype=float32)

    It is not a `CompositeTensor`, since the function may close over tensors. `copy` works, slicing
    does not. Variables that `log_prob_fn` closes over are not among its `variables`, unless
    `log_prob_fn` is a `tf.Module`. Derivatives of `log_prob`, of every order, are those of
    `log_prob_fn`.

    Args:
        log_prob_fn: Maps `[..., event]` of `dtype` to `[...]`, of the same dtype if that is
            floating. For a batch of densities it maps a single event to the batch shape, which is
            found by tracing it; the dimensions of a value in front of the event broadcast against
            the batch shape. In AutoBatched joint distributions it is called with single events.
        event_shape: The shape of an event: an int or ints.
        dtype: The dtype of an event.
        bijector: Maps the reals to the support: the default for unconstrained inference. None: the
            support is all reals.
        sample_fn: Called as `sample_fn(sample_shape, seed=seed)` with a stateless seed, like the
            `sample` method of a distribution, to draw `[*sample_shape, batch..., event...]`. Draws
            are constants, not reparameterized. None: `sample` raises.
        validate_args: As in all distributions. There are no arguments to validate.
        allow_nan_stats: As in all distributions.
        name: The name of the part in joint distributions, and of operations.

    Raises:
        TypeError: An argument or a returned value has the wrong type or dtype.
        ValueError: An argument or a returned value has the wrong shape.
        NotImplementedError: In `sample`, without `sample_fn`.
    """

    def __init__(
        self,
        log_prob_fn: Callable[[Tensor], Tensor],
        event_shape: int | Sequence[int],
        dtype: DTypeLike,
        bijector: tfb.Bijector | None = None,
        sample_fn: Function | None = None,
        validate_args: bool = False,
        allow_nan_stats: bool = True,
        name: str = "LogDensity",
    ) -> None:
        parameters = dict(locals())
        if not callable(log_prob_fn):
            raise TypeError(f"log_prob_fn must be a function, got {type(log_prob_fn).__name__}.")
        if sample_fn is not None and not callable(sample_fn):
            raise TypeError(
                f"sample_fn must be a function or None, got {type(sample_fn).__name__}."
            )
        if bijector is not None and not isinstance(bijector, tfb.Bijector):
            raise TypeError(
                f"bijector must be a tfp.bijectors.Bijector or None, got {type(bijector).__name__}."
            )
        with tf.name_scope(name) as name:
            self._log_prob_fn, self._sample_fn, self._bijector = log_prob_fn, sample_fn, bijector
            self._static_event_shape = _static(event_shape)
            self._static_batch_shape: tf.TensorShape | None = None
            super().__init__(
                dtype=tf.as_dtype(dtype),
                reparameterization_type=tfd.NOT_REPARAMETERIZED,
                validate_args=validate_args,
                allow_nan_stats=allow_nan_stats,
                parameters=parameters,
                name=name,
            )

    @classmethod
    def _parameter_properties(cls, dtype: DType, num_classes: int | None = None) -> Kwargs:
        raise NotImplementedError(
            "LogDensity cannot be sliced, since log_prob_fn determines its batch. Slice what "
            "log_prob_fn uses, and make another LogDensity."
        )

    def _event_shape(self) -> tf.TensorShape:
        return self._static_event_shape

    def _event_shape_tensor(self) -> Tensor:
        return tf.constant(self._static_event_shape.as_list(), tf.int32)

    def _batch_shape(self) -> tf.TensorShape:
        if self._static_batch_shape is None:
            event = tf.TensorSpec(self.event_shape, self.dtype)
            traced = tf.function(self._densities, autograph=False).get_concrete_function(event)
            self._static_batch_shape = traced.output_shapes
        return self._static_batch_shape

    def _batch_shape_tensor(self) -> Tensor:
        return tf.shape(self._densities(self._point()))

    def _log_prob(self, x: Tensor) -> Tensor:
        batch = tf.TensorShape(None)
        if x.shape.rank is not None:
            batch_ndims = x.shape.rank - self.event_shape.rank
            batch = x.shape[:batch_ndims]
            if batch_ndims < 0 or not x.shape[batch_ndims:].is_compatible_with(self.event_shape):
                raise ValueError(
                    f"The value of {self.name!r} must have a shape that ends with its event_shape "
                    f"{_shown(self.event_shape)}, got {_shown(x.shape)}."
                )
        y = self._densities(x)
        if not y.shape.is_compatible_with(batch):  # finding batch_shape takes a trace
            with contextlib.suppress(ValueError):
                batch = tf.broadcast_static_shape(batch, self.batch_shape)
        if not y.shape.is_compatible_with(batch):
            raise ValueError(
                f"log_prob_fn of {self.name!r} returned the shape {_shown(y.shape)} for a value "
                f"of shape {_shown(x.shape)}, expected {_shown(batch)}. It must sum over the "
                f"event dimensions, {_shown(self.event_shape)}, and keep all others."
            )
        known = x.shape.is_fully_defined() and y.shape.is_fully_defined()
        return y if known else self._checked(x, y)

    def _checked(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns `y`, with the shapes checked at run time that are not known before."""
        shape = tf.shape(x)
        batch_ndims = tf.maximum(tf.rank(x) - self.event_shape.rank, 0)
        expected = shape[:batch_ndims]
        if self.batch_shape.rank != 0:
            expected = tf.broadcast_dynamic_shape(expected, self.batch_shape_tensor())
        fits = structures.equal_shapes(shape[batch_ndims:], self.event_shape_tensor())
        fits &= structures.equal_shapes(tf.shape(y), expected)
        message = (
            f"The value of {self.name!r} must have a shape that ends with its event_shape "
            f"{_shown(self.event_shape)}, and log_prob_fn must sum over these dimensions and keep "
            "all others. The shapes of its result and of the value:"
        )
        return structures.checked(fits, y, message, x)

    def _densities(self, x: Tensor) -> Tensor:
        y = self._log_prob_fn(x)
        if not tf.is_tensor(y):
            raise TypeError(
                f"log_prob_fn of {self.name!r} must return a tensor, got {type(y).__name__}, which "
                "has no gradient. To embed what is computed outside TensorFlow, use "
                "sgtrick.from_numpy or sgtrick.custom_gradient."
            )
        floating = self.dtype.is_floating
        if y.dtype != self.dtype if floating else not y.dtype.is_floating:
            event = f"{self.dtype.name} like the event (the value had {x.dtype.name})"
            raise TypeError(
                f"log_prob_fn of {self.name!r} returned dtype {y.dtype.name}, expected "
                f"{event if floating else 'a floating dtype'}. Cast it."
            )
        return y

    def _sample_n(self, n: int | Tensor, seed: Seed = None) -> Tensor:
        if self._sample_fn is None:
            if not _asked_for_structure_alone():
                raise NotImplementedError(
                    f"{self.name!r} cannot be sampled. Pass sample_fn to LogDensity, a function "
                    "that is called as sample_fn(sample_shape, seed=seed), or use MCMC."
                )
            shape = tf.concat([[n], self.batch_shape_tensor(), self.event_shape_tensor()], 0)
            return tf.broadcast_to(self._point(), shape)
        x = structures.to_tensor(
            self._sample_fn([n], seed=tfp.random.sanitize_seed(seed)), "the result of sample_fn"
        )
        expected = tf.TensorShape([tf.get_static_value(n)]) + self.batch_shape + self.event_shape
        if x.dtype != self.dtype or not x.shape.is_compatible_with(expected):
            raise ValueError(
                f"sample_fn of {self.name!r} returned {x.dtype.name} of shape {_shown(x.shape)}, "
                f"expected {self.dtype.name} of shape {_shown(expected)}, the sample, batch and "
                "event dimensions."
            )
        return tf.stop_gradient(x)

    def _point(self) -> Tensor:
        """An event of the support."""
        bijector = self.experimental_default_event_space_bijector()
        return bijector.forward(
            tf.zeros(bijector.inverse_event_shape(self.event_shape), self.dtype)
        )

    def _default_event_space_bijector(self) -> tfb.Bijector:
        if self._bijector is None:
            return tfb.Identity(validate_args=self.validate_args)
        return self._bijector


def _asked_for_structure_alone() -> bool:
    """Whether a joint distribution runs its model only for shapes and dtypes, not for a draw.

    It does so before anything else, by calling `sample` of its parts, so otherwise no joint
    distribution could contain a density that cannot be sampled. Only the call stack tells this from
    a draw.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in _ASKING:
            return True
        frame = frame.f_back
    return False


_ASKING = {"_get_static_distribution_attributes", "_get_single_sample_distributions"}


def _is_reference(value: TensorLike) -> bool:
    """Whether the value has to be read when it is used: (Keras) variables and deferred tensors."""
    return hasattr(value, "assign") or isinstance(value, tf.Module)


def _static(event_shape: int | Sequence[int]) -> tf.TensorShape:
    """The event shape as a fully defined `TensorShape`."""
    try:
        one = isinstance(event_shape, numbers.Integral)
        shape = tf.TensorShape([event_shape] if one else event_shape)
    except (TypeError, ValueError) as error:
        raise TypeError(f"event_shape must be an int or ints, got {event_shape!r}.") from error
    if not shape.is_fully_defined():
        raise ValueError(f"event_shape must be fully defined, got {event_shape!r}.")
    return shape


def _shown(shape: tf.TensorShape) -> str:
    return shapes.show(None if shape.rank is None else tuple(shape))
