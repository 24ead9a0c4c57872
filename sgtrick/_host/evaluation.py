"""One call of an engine for its values: all tensors that its derivatives are functions of."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from sgtrick._arguments.structures import Leaf
from sgtrick._host.host_call import HostCall, ValueExtras
from sgtrick._tensorflow.graphs import here
from sgtrick._types import Tensor


class Evaluation(NamedTuple):
    """One call of an engine for its values.

    Attributes:
        call: The host call.
        sent: The leaves that were sent; batch dimensions that members share may have size 1.
        points: The leaves that have derivatives, with the batch of the values.
        values: The values.
        extras: What came with these.
    """

    call: HostCall
    sent: Sequence[Tensor]
    points: Sequence[Tensor]
    values: Sequence[Tensor]
    extras: ValueExtras

    @property
    def name(self) -> str:
        """The name of the engine in errors."""
        return self.call.layout.name

    def gives(self, key: str) -> bool:
        """Whether there are products with the Jacobians, by these or by a function."""
        functions = self.call.engine.functions
        return bool(self.extras.jacobians or self.call.engine.scheme or key in functions)

    @property
    def hessp(self) -> str | None:
        """The question for second derivatives, if there is an answer."""
        return self.call.engine.hessp(self.call.layout.value.is_number)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, each once. First the points."""
        groups = [self.points, self.sent, self.values, *self.extras]
        return list({id(t): t for group in groups for t in group}.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Evaluation":
        """This evaluation with other tensors."""
        others = {id(t): other for t, other in zip(self.tensors, tensors, strict=True)}

        def taken(group: Sequence[Tensor]) -> list[Tensor]:
            return [others[id(t)] for t in group]

        points, sent, values = map(taken, (self.points, self.sent, self.values))
        return Evaluation(self.call, sent, points, values, ValueExtras(*map(taken, self.extras)))

    def here(self) -> "Evaluation":
        """This evaluation in the graph that is being traced."""
        return self if tf.executing_eagerly() else self.with_tensors(list(map(here, self.tensors)))

    def with_jacobians(self) -> "Evaluation":
        """This evaluation with Jacobians by differences, if these are taken."""
        if self.extras.jacobians or not self.call.engine.scheme:
            return self
        jacobians = self.call.differences(self.sent, self.extras)
        found = self._replace(extras=self.extras._replace(jacobians=jacobians))
        found.set_shapes()
        return found

    def set_shapes(self) -> None:
        """Sets the static shapes of what came with the values, as far as they are known."""
        y, n = self.values[0], len(self.call.layout.value.shapes[0])
        batch = y.shape[: y.shape.rank - n]
        for t, y in zip(self.extras.in_float64, self.values, strict=False):
            t.set_shape(y.shape)
        for t in [*self.extras.failed, *self.extras.precision]:
            t.set_shape(batch)
        for t in self.extras.unknown:
            t.set_shape(batch.concatenate([None]))
        for row, y in zip(self.rows(), self.values, strict=False):
            for leaf in row:
                leaf.gx.set_shape(y.shape.concatenate(leaf.x.shape[batch.rank :]))

    def rows(self) -> list[list[Leaf]]:
        """For each value, the points with its Jacobians, if these are known."""
        layout, jacobians = self.call.layout, iter(self.extras.jacobians)
        ndims = self.values[0].shape.rank - len(layout.value.shapes[0])
        paths = [layout.leaves[k].path for k in layout.places]
        points = list(zip(paths, self.points, strict=True))
        return [
            [Leaf(path, x, gx, ndims) for (path, x), gx in zip(points, jacobians, strict=False)]
            for _ in self.values
        ]

    def of_all(
        self, vectors: Sequence[Tensor], inputs: Sequence[tuple[Tensor, bool]]
    ) -> tuple["Evaluation", list[Tensor]]:
        """This evaluation, and vectors, for all members of a `tf.vectorized_map`.

        `inputs` are the vectors and then its tensors, and whether each has a batch dimension.
        """
        sizes = [(t.shape[0], tf.shape(t)[:1]) for t, is_stacked in inputs if is_stacked]
        sent_alone = {id(t) for t in self.sent} - {id(t) for t in self.points}
        tensors = []
        for (t, is_stacked), like in zip(inputs, [*vectors, *self.tensors], strict=True):
            if sizes and not is_stacked:
                t = t[tf.newaxis]
                if id(like) not in sent_alone:  # the host broadcasts these itself
                    t = tf.broadcast_to(t, tf.concat([sizes[0][1], tf.shape(t)[1:]], 0))
            t.set_shape([t.shape[0], *like.shape] if sizes else like.shape)
            tensors.append(t)
        return self.with_tensors(tensors[len(vectors) :]), tensors[: len(vectors)]
