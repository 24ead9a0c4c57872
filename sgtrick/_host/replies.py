"""What the functions of an engine are called with, and what they must return."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sgtrick._arguments import shapes, structures
from sgtrick._host import hessians
from sgtrick._host.contract import CallSpec, Parts, Shape, copy, show, too_few_dimensions
from sgtrick._types import Array, DTypeLike, Structure


class Reply:
    """The reply of a function of an engine: arrays, here called parts.

    A call is for one member or, if vectorized, a batch; arrays then have the batch shape in front.
    Each reply is a class with `shapes`, `parts` and `instead`.

    Attributes:
        spec: How the leaves form the arguments.
        name: The name of the engine.
        paths: The names of the leaves that the function is called with.
        event_ndims: Their numbers of event dimensions.
        dtypes: The dtypes of the parts for TensorFlow.
        value_count: How many parts, the first ones, have the shapes of the value.
        what: What errors call the parts that are like the value.
        has_aux: Whether the last part is aux.
        counts_nonfinite: Whether parts that are not finite are counted.
    """

    def __init__(self, spec: CallSpec, dtypes: Sequence[DTypeLike], value_count: int) -> None:
        self.spec, self.name = spec, spec.name
        self.dtypes, self.value_count = dtypes, value_count
        self.paths, self.event_ndims = spec.paths, spec.event_ndims
        self.what, self.has_aux, self.counts_nonfinite = "the value", False, True

    def incoming(self, arrays: Sequence[Array | bytes], dtype: DTypeLike) -> list[Array]:
        """Copies for the function, which may modify and keep them; the originals are TensorFlow's.

        Args:
            arrays: The leaves as TensorFlow passed them, and then those of vectors.
            dtype: The dtype to which vectors and leaves with derivatives are cast.

        Raises:
            ValueError: A leaf has too few dimensions.
        """
        leaves = []
        vectors = [dtype] * (len(arrays) - len(self.spec.dtypes))
        for a, path, ndims, own in zip(
            arrays, self.paths, self.event_ndims, [*self.spec.dtypes, *vectors], strict=True
        ):
            if own is not None:
                leaf = copy(a, dtype)
            else:  # as a NumPy string, bytes would lose trailing zeros
                leaf = np.array(a, object if isinstance(a, bytes) else None)
            if leaf.ndim < ndims:
                raise too_few_dimensions(path, leaf.shape, ndims)
            leaves.append(leaf)
        return leaves

    def arguments(self, leaves: Sequence[Array]) -> Sequence[Structure]:
        """The arguments of the function."""
        return self.spec.pack(leaves)

    def shapes(
        self, batch: Shape, events: Sequence[Shape], like: Sequence[Any] = (), ndims: int = 0
    ) -> list[Shape]:
        """The shapes of the parts for a batch.

        Args:
            batch: The shape of the batch.
            events: The shapes of the leaves, without batch.
            like: Parts that tell what only they do; without them, unknown dimensions are zero.
            ndims: How many batch dimensions these have.
        """
        raise NotImplementedError

    def parts(
        self, returned: Structure, batch: Shape, events: Sequence[Shape], leaves: Sequence[Array]
    ) -> Parts:
        """The checked parts of what the function returned for `leaves`; None for unknown ones."""
        raise NotImplementedError

    def instead(self, value: float) -> list[float]:
        """What the parts of a failed call are filled with, `value` in place of the value."""
        raise NotImplementedError

    def value_shapes(self, batch: Shape, like: Sequence[Any], ndims: int) -> list[Shape]:
        """Those of the parts that are like the value."""
        known = [part.shape[ndims:] for part in like[: self.value_count]]
        return [batch + shape for shape in known or self.spec.value.least]

    @functools.cached_property
    def unstated(self) -> list[tuple[int, str]]:
        """The parts whose shape only the function tells, and what errors call them."""
        values = [] if self.spec.value.is_known else self.spec.value.paths[: self.value_count]
        return [
            *((k, self.what + path) for k, path in enumerate(values)),
            *[(-1, "aux")] * self.has_aux,
        ]

    def check_same(self, parts: Parts, ndims: int, columns: Parts, batch: Shape) -> None:
        """Raises a ValueError if the parts of a member are not shaped like those of others."""
        for k, what in self.unstated:
            came, expected = parts[k].shape[ndims:], columns[k].shape[len(batch) :]
            if came != expected:
                raise ValueError(
                    f"{what} of {self.name} must have the same shape for all members of a batch, "
                    f"got {shapes.show(expected)} and {shapes.show(came)}."
                )

    def outgoing(self, parts: Parts) -> list[Array]:
        """Copies for TensorFlow, in its dtypes; engines may return the same buffer each time."""
        return list(map(copy, parts, self.dtypes))


class Evaluation(Reply):
    """The reply `(value, gradient)` or `((value, aux), gradient)`, or the value, or value and aux.

    For a value that is an array, the gradient is its Jacobian.
    """

    def __init__(self, spec: CallSpec) -> None:
        super().__init__(spec, spec.outputs, len(spec.value.shapes))
        self.has_aux = spec.aux_dtype is not None
        self._gradients = [  # in errors
            f"the gradient of value{path}" if path else "the gradient" for path in spec.value.paths
        ]

    def shapes(
        self, batch: Shape, events: Sequence[Shape], like: Sequence[Any] = (), ndims: int = 0
    ) -> list[Shape]:
        """The shapes of the values, the gradients, whether the engine failed, and aux."""
        spec, values = self.spec, self.value_shapes(batch, like, ndims)
        gradients = [value + events[k] for value in values for k in spec.places]
        return [
            *values,
            *(gradients if spec.has_gradient else []),
            *[batch] * spec.tells_failures,
            *[batch + (np.shape(like[-1])[ndims:] if like else ())] * self.has_aux,
        ]

    def instead(self, value: float) -> list[float]:
        """`value`, zero gradients, the failure, and NaN for aux."""
        spec = self.spec
        zeros = [0.0] * (self.value_count * len(spec.places) * spec.has_gradient)
        failed, aux = [1.0] * spec.tells_failures, [np.nan] * self.has_aux
        return [*[value] * self.value_count, *zeros, *failed, *aux]

    def parts(
        self, returned: Structure, batch: Shape, events: Sequence[Shape], leaves: Sequence[Array]
    ) -> Parts:
        """The values, their gradients by leaves that have derivatives, no failure, and aux if any.

        Raises:
            TypeError: The engine did not return `(value, gradient)`, or `((value, aux), gradient)`,
                of real numbers.
            ValueError: The shape or structure is wrong.
        """
        del leaves
        spec, name = self.spec, self.name
        if not spec.has_gradient:
            returned = returned, None
        elif isinstance(returned, tuple) and len(returned) > 2:
            raise TypeError(
                f"{name} must return {self._wanted()}, got {show(returned)}. With several "
                "arguments the gradient is one tuple, and with several outputs the value is one "
                "dict or tuple, whose shapes are value_shape."
            )
        elif not structures.is_pair(returned) or (returned[1] is None and spec.places):
            raise TypeError(
                f"{name} must return {self._wanted()}, got {show(returned)}, a value without a "
                "gradient. Return both; or pass a function for the gradient, as grad= or vjp=; or "
                "write the function in PyTorch or JAX, and let from_torch or from_jax compute its "
                'gradient; or pass grad="3-point" for finite differences; or, for a sampler that '
                "needs no gradient, return the value alone and pass grad=False."
            )
        value, gradient = returned
        aux = []
        if self.has_aux:
            if not structures.is_pair(value):
                raise TypeError(
                    f"{name} must return {self._wanted()}, got {show(value)} in place of "
                    "(value, aux). Return both, or remove has_aux=True."
                )
            value, aux = value[0], [self._aux(value[1], batch)]
        values = spec.values(value, batch, events)
        gradients = []
        if spec.has_gradient:
            for row, what, y in zip(spec.rows(gradient), self._gradients, values, strict=True):
                gradients += spec.gradients(row, y.shape, events, what)
        failed = [np.zeros(batch)] * spec.tells_failures
        return [*values, *gradients, *failed, *aux]

    def _aux(self, given: object, batch: Shape) -> Array:
        aux = np.array(self.spec.checked(given, None, "aux"))
        if aux.shape[: len(batch)] != batch:
            raise ValueError(
                f"aux of {self.name} must have the batch shape {shapes.show(batch)} in front, "
                f"got {shapes.show(aux.shape)}."
            )
        return aux

    def _wanted(self) -> str:
        value = "(value, aux)" if self.has_aux else "value"
        return f"({value}, gradient)" if self.spec.has_gradient else value


class Product(Reply):
    """The product of a derivative with vectors, the reply of a function `(*arrays, *vectors)`.

    A vector is like the value if it is called "u", and like the arguments if not, with None for
    leaves without derivatives. The product is like one of these, too. The leaves of a call are
    those of the arguments, followed by those of the vectors.
    """

    def __init__(
        self,
        spec: CallSpec,
        what: str,
        vectors: str,
        *,
        to_value: bool = False,
        whole: bool = False,
    ) -> None:
        """For errors, `what` is the product. `vectors` has one letter for each vector.

        If `whole`, the function takes no vectors and returns the Hessian.
        """
        m = len(spec.value.shapes)
        dtypes = spec.outputs[:m] if to_value else spec.gradient_dtypes
        super().__init__(spec, dtypes, m if to_value else 0)
        self.what, self._vectors, self._to_value = what, vectors, to_value
        self._whole = whole
        of_value = [len(shape) for shape in spec.value.shapes]
        of_points = [spec.event_ndims[k] for k in spec.places]
        self.paths, self.event_ndims = [*spec.paths], [*spec.event_ndims]
        for w in vectors:
            points = [f"{w} of {spec.paths[k]}" for k in spec.places]
            self.paths += [f"u{path}" for path in spec.value.paths] if w == "u" else points
            self.event_ndims += of_value if w == "u" else of_points

    def arguments(self, leaves: Sequence[Array]) -> Sequence[Structure]:
        """The arguments of the engine, and each vector in its structure."""
        spec, n = self.spec, len(self.spec.paths)
        arguments, rest = list(spec.pack(leaves[:n])), iter(leaves[n:])
        for w in "" if self._whole else self._vectors:
            if w == "u":
                arguments.append(spec.value.pack([next(rest) for _ in spec.value.shapes]))
            else:
                flat = [next(rest) if k in spec.places else None for k in range(n)]
                packed = spec.pack(flat)
                arguments.append(packed[0] if len(packed) == 1 else tuple(packed))
        return arguments

    def shapes(
        self, batch: Shape, events: Sequence[Shape], like: Sequence[Any] = (), ndims: int = 0
    ) -> list[Shape]:
        """The shapes of the product: those of the value, or of the leaves with derivatives."""
        if self._to_value:
            return self.value_shapes(batch, like, ndims)
        return [batch + events[k] for k in self.spec.places]

    def instead(self, value: float) -> list[float]:
        """NaN, because the value may be valid there and have a slope."""
        del value
        return [np.nan] * len(self.dtypes)

    def parts(
        self, returned: Structure, batch: Shape, events: Sequence[Shape], leaves: Sequence[Array]
    ) -> Parts:
        """The leaves of the product; None for unknown ones.

        Raises:
            TypeError: The function returned something other than real numbers.
            ValueError: The shape or structure is wrong, or a Hessian is not symmetric.
        """
        if self._whole:
            vs = leaves[len(self.spec.paths) :]
            return hessians.product(self.spec, returned, batch, events, vs)
        if returned is None:
            like = "like the value" if self._to_value else "like the arguments"
            raise TypeError(f"{self.what} of {self.name} must be {like}, got None.")
        if self._to_value:
            return list(self.spec.values(returned, batch, what=self.what))
        return self.spec.gradients(returned, batch, events, self.what)
