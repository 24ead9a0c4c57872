"""What a tensor in a graph is connected to, as TensorFlow sees it."""

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph, ops

from sgtrick._arguments.structures import is_differentiable
from sgtrick._tensorflow import graphs, ongoing, passing, tapes
from sgtrick._tensorflow.tracing import Outline, gradients_in
from sgtrick._types import Operation, Tensor

# The attribute of a kept override with the number of its values.
VALUES = "_sgtrick_values"
# That of one whose gradient, in a probe, is connected to all its other inputs.
IS_CONNECTED = "_sgtrick_is_connected"
# That of one whose value passes derivatives on.
PASSES_ON = "_sgtrick_passes_on"


def are_connected(y: Tensor, xs: Sequence[Tensor]) -> bool:
    """Whether TensorFlow finds a derivative of `y` with respect to one of `xs`, in its graph.

    It is asked for one, in a probe. The graph of `y` should be one too: in loops, TensorFlow adds
    what stores all iterates.
    """
    if not xs or not is_differentiable(y.dtype):
        return False
    if _are_surely_connected(y, xs):
        return True
    # The gradients of loops and calls take long. Mostly there is a connection beside them.
    calls = [t for op in y.graph.get_operations() if op.type in _CALLS for t in op.outputs]
    return (bool(calls) and _is_found(y, xs, calls)) or _is_found(y, xs, [])


def _are_surely_connected(y: Tensor, xs: Sequence[Tensor]) -> bool:
    """Whether a path leads from `y` to one of `xs` by operations that pass derivatives on.

    TensorFlow builds gradients to tell, which takes as long as tracing.
    """
    names = set(map(graphs.identity_of, xs))
    stack, seen = [y], set[Hashable]()
    while stack:
        t = stack.pop()
        key = graphs.identity_of(t)
        if key in names:
            return True
        if key not in seen:
            seen.add(key)
            stack += filter(lambda i: is_differentiable(i.dtype), _passing(t.op))
    return False


def _passing(op: Operation) -> Sequence[Tensor]:
    """The inputs of an operation that are known to get a gradient, if they have derivatives."""
    if op.type in _SMOOTH and not graphs.is_overridden(op):
        return op.inputs  # type: ignore[no-any-return]
    if op.type == "IdentityN" and graphs.attribute(op, IS_CONNECTED):
        return op.inputs[graphs.attribute(op, VALUES) :]  # type: ignore[no-any-return]
    return ()


# The inputs of these that have derivatives all get a gradient.
_SMOOTH = (
    *("Identity", "Neg", "Cast", "Add", "AddV2", "AddN", "Sub", "Mul", "MulNoNan", "RealDiv"),
    *("MatMul", "BatchMatMulV2", "Einsum", "Sum", "Mean", "Reshape", "ExpandDims", "Squeeze"),
    *("Transpose", "Pack", "StridedSlice", "SelectV2", "Exp", "Expm1", "Log", "Log1p", "Sin"),
    *("Cos", "Tan", "Sinh", "Cosh", "Tanh", "Sigmoid", "Softplus", "Sqrt", "Rsqrt", "Square"),
    *("Pow", "Reciprocal", "Erf", "Lgamma"),
)

_CALLS = (
    *("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"),
    *graphs.CALLS,
)


def _is_found(y: Tensor, xs: Sequence[Tensor], constant: Sequence[Tensor]) -> bool:
    """Whether it finds one beside some tensors that count as constant."""
    with func_graph.FuncGraph("sgtrick_connections").as_default(), ongoing.probing():
        upstream = tf.compat.v1.placeholder(y.dtype, y.shape)
        try:
            found = gradients_in(y.graph, [y], xs, [upstream], constant)
        except LookupError as error:  # an operation without a gradient, where TensorFlow raises
            if type(error) is not LookupError:
                raise
            return True
        return any(g is not None for g in found)


def depends(y: Tensor, xs: Sequence[Tensor]) -> bool:
    """Whether `y` was computed from one of `xs` in a graph, by operations that have derivatives.

    TensorFlow is not asked here: that would add to the loops of a graph that is going to run.
    """
    names = set(map(graphs.identity_of, xs))
    return any(graphs.identity_of(t) in names for t in _with_ancestors([y]))


def lost_in_calls(y: Tensor, xs: Sequence[Tensor]) -> list[int]:
    """The numbers of those of `xs`, handles, whose tangents accumulators lose on the way to `y`.

    In a graph they watch what the graph captured for the handle of a variable. A `tf.function` that
    is called there gets it, but they do not look for it among what the function captured.
    """
    if tf.executing_eagerly() or not tapes.somebody_pushes():
        return []

    def has_no_tangent(t: Tensor) -> bool:
        is_of_call = graphs.operation(t) is not None and t.op.type in _CALLS
        return is_of_call and is_differentiable(t.dtype) and not tapes.is_pushed([t])

    calls = list(filter(has_no_tangent, _with_ancestors([y])))
    reached = set(map(graphs.identity_of, _with_ancestors(calls)))
    handles = [(k, graphs.as_used(x)) for k, x in enumerate(xs) if x.dtype == tf.resource]
    return [k for k, handle in handles if graphs.identity_of(handle) in reached]


def eager_sources(ys: Sequence[Tensor]) -> list[Tensor]:
    """The eager tensors with derivatives that some tensors are, or were computed from in graphs."""
    return [
        t for t in _with_ancestors(ys) if graphs.operation(t) is None and is_differentiable(t.dtype)
    ]


def _with_ancestors(ys: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields tensors, and those that they were computed from in graphs."""
    stack, seen = list(ys), set[Hashable]()
    while stack:
        t = stack.pop()
        key = graphs.identity_of(t)
        if key not in seen:
            seen.add(key)
            yield t
            stack += filter(graphs.may_carry, _computed_from(t))


def unaccounted(
    ys: Sequence[Tensor], xs: Sequence[Tensor], handles: Sequence[Tensor]
) -> list[Tensor]:
    """What some tensors were computed from besides `xs`, and those not computed from `xs` at all.

    What a tensor was computed from besides `xs` are the last tensors before it that were computed
    neither from `xs` nor from the variables, without constants. Handles of other variables may be
    among them, and lists of tensors of which nothing tells what they were made of.

    Args:
        ys: Tensors, and handles of variables.
        xs: Tensors, and handles of variables.
        handles: The handles of variables that count like `xs`, but only beside these.
    """
    if not ys:
        return []
    start = _start([*xs, *handles])
    names = {graphs.identity_of(t) for x in xs for t in (x, graphs.outside(x))}
    beside = names | set(map(graphs.identity_of, handles))
    before, users = dict[Hashable, list[Tensor]](), defaultdict[Hashable, list[Hashable]](list)
    stack = list(ys)
    while stack:
        t = stack.pop()
        key = graphs.identity_of(t)
        if key not in before:
            is_end = key in beside or _is_before(t, start)
            before[key] = [] if is_end else list(filter(graphs.may_carry, _computed_from(t)))
            for source in before[key]:
                users[graphs.identity_of(source)].append(key)
            stack += before[key]
    of_xs, of_any = _reached(names, users), _reached(beside, users)
    found = {graphs.identity_of(y): y for y in ys if graphs.identity_of(y) not in of_xs}
    stack, seen = [y for y in ys if graphs.identity_of(y) in of_xs], set[Hashable]()
    while stack:
        key = graphs.identity_of(stack.pop())
        if key not in seen:
            seen.add(key)
            for source in before[key]:
                name = graphs.identity_of(source)
                # A list of tensors has no derivatives itself.
                if name in of_any or (source.dtype == tf.variant and before[name]):
                    stack.append(source)
                elif not _is_constant(source):
                    found[name] = source
    return list(found.values())


def _computed_from(t: Tensor) -> list[Tensor]:
    """The tensors that one in a graph is computed from, by an operation that has derivatives."""
    op = graphs.operation(t)
    if op is None:
        return []
    outside = graphs.captured_from(t)
    if outside is not None:
        return [outside]
    return [] if graphs.has_no_gradient(op) else list(passing.inputs_of(op, t))


def _start(tensors: Sequence[Tensor]) -> Operation | None:
    """The first operation of these tensors, if all are in the current graph: none before uses them.

    Nor what was computed from them in a graph around it, and captured. A search that stops there
    takes work in proportion to what was computed since, and not to the whole graph.
    """
    graph = tf.compat.v1.get_default_graph()
    inside = [graphs.as_used(graphs.outside(t)) for t in tensors]
    if not all(graphs.operation(t) is not None and t.graph is graph for t in inside):
        return None
    pairs = getattr(graph, "captures", ())
    captured = [i for o, i in pairs if graphs.operation(o) is not None and graphs.may_carry(o)]
    return min((t.op for t in (*inside, *captured)), key=lambda op: op._id, default=None)


def _is_before(t: Tensor, start: Operation | None) -> bool:
    op = graphs.operation(t)
    if start is None or op is None or op.graph is not start.graph or t.dtype == tf.variant:
        return False
    return op._id < start._id and bool(op.inputs)


def _reached(
    keys: Iterable[Hashable], users: Mapping[Hashable, Sequence[Hashable]]
) -> set[Hashable]:
    """The keys, and those that they lead to."""
    reached, stack = set[Hashable](), list(keys)
    while stack:
        key = stack.pop()
        if key not in reached:
            reached.add(key)
            stack += users.get(key, ())
    return reached


def _is_constant(t: Tensor) -> bool:
    """Whether nothing before a tensor in a graph, nor the tensor itself, has derivatives."""
    op = graphs.operation(t)
    if t.dtype == tf.resource:
        return not graphs.holds_floats(t)
    if op is None or graphs.captured_from(t) is not None or tapes.is_recorded([t]):
        return False
    if not op.inputs:
        return bool(op.type == "Const")
    return graphs.has_no_gradient(op) or not any(map(graphs.may_carry, op.inputs))


def varying(
    outer: Sequence[Tensor], inner: Sequence[Tensor], known: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The captured tensors of a traced function with respect to which derivatives may be taken.

    Args:
        outer: The tensors that it captured.
        inner: The same in its graph.
        known: Some of those with respect to which they may.
    """
    names = {graphs.identity_of(t) for k in known for t in (k, graphs.outside(k))}
    pairs = zip(outer, inner, strict=True)
    return [i for o, i in pairs if graphs.identity_of(o) in names or _may_vary(o)]


def _may_vary(t: Tensor) -> bool:
    if t.dtype == tf.resource:
        return graphs.holds_floats(t)
    if not is_differentiable(t.dtype):
        return bool(t.dtype == tf.variant)
    if graphs.operation(t) is None:
        return tapes.is_recorded([t])
    inputs = getattr(t.graph, "inputs", None)
    if inputs is None:  # a graph of TensorFlow 1
        return bool(t.op.type != "Const")
    return depends(t, list(filter(graphs.may_carry, inputs)))


def foreign(
    traced: Outline, inputs: Sequence[Tensor], age: int | None
) -> Callable[[Operation], bool]:
    """Tells of the operations of a trace whether NumPy may have computed their numbers of `inputs`.

    Args:
        traced: The trace.
        inputs: The placeholders of what derivatives may be taken with respect to. What was made of
            these and is not connected to them, was stopped.
        age: That of the oldest of the inputs. None if they are symbolic, so that NumPy cannot have
            computed anything of them, unless the host was called.
    """
    names = {t.op.name for t in inputs}
    pairs = zip(traced.captured, traced.inner, strict=True)
    outer = {i.op.name: o for o, i in pairs if graphs.operation(o) is None}

    def is_foreign(op: Operation) -> bool:
        if op.name in names or op.type in graphs.HOST_CALLS:
            return True
        if age is None or op.name in traced.written:
            return False
        return op.name not in outer or ops.tensor_id(outer[op.name]) >= age

    return is_foreign


# Constant between steps, so that what passes them does not move.
_STEPS = ("ZerosLike", "OnesLike", "Floor", "Ceil", "Round", "Rint", "Sign")


class Subgraph:
    """The operations that a tensor is computed by, as far as they have derivatives."""

    def __init__(self, y: Tensor) -> None:
        definition = y.graph.as_graph_def()
        self._functions = {f.signature.name: f for f in definition.library.function}
        self._nodes = {node.name: node for node in definition.node}
        self._y = y

    @functools.cached_property
    def host_calls(self) -> list[str]:
        """The names of those that call the host with something that has derivatives."""
        computed = _before(self._nodes, [self._y.op.name])
        return [node.name for node in computed if self._calls_host(node)]

    def host_sees(self, xs: Sequence[Tensor]) -> bool:
        """Whether a host call depends on one of `xs`."""
        names = {x.op.name for x in xs}
        return any(node.name in names for node in _before(self._nodes, self.host_calls))

    def made_of(self, us: Sequence[Tensor]) -> list[Operation]:
        """Where the numbers come from that move the tensor, apart from `us`.

        Constants and inputs, but not those behind a comparison, an index, a shape, or other steps:
        what is made of these does not change with them. Calls of the host are among them, and calls
        of functions that have constants.
        """
        known = set(map(graphs.identity_of, us))
        found, stack = dict[str, Operation](), [self._y]
        while stack:
            t = stack.pop()
            op = t.op
            is_end = graphs.identity_of(t) in known or op.name in found or op.type in _STEPS
            # What is not among the nodes, TensorFlow has added to loops since.
            if graphs.may_carry(t) and not is_end and op.name in self._nodes:
                found[op.name] = op
                stack += op.inputs
        return [op for op in found.values() if not op.inputs or self._brings_numbers(op)]

    def _calls_host(self, node: Any) -> bool:
        is_host = node.op in graphs.HOST_CALLS and any(map(_is_float, node.attr["Tin"].list.type))
        return is_host or any(map(self._calls_host, self._inside(node)))

    def _brings_numbers(self, op: Operation) -> bool:
        inside = self._inside(self._nodes[op.name])
        return op.type in graphs.HOST_CALLS or any(map(self._is_source, inside))

    def _is_source(self, node: Any) -> bool:
        is_input = not node.input and _is_float(node.attr["dtype"].type)
        return is_input or any(map(self._is_source, self._inside(node)))

    def _inside(self, node: Any) -> list[Any]:
        """The operations of the functions that an operation calls."""
        names = {f.name for a in node.attr.values() for f in (a.func, *a.list.func)}
        found = [self._functions[name] for name in names if name in self._functions]
        return [
            inside
            for f in found
            for inside in _before({n.name: n for n in f.node_def}, map(_name, f.ret.values()))
        ]


def _before(nodes: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """The operations with these names, and those before them in a graph.

    Not what is stopped, nor the values of a kept override, unless these are among its inputs too:
    otherwise their own derivatives are not used.
    """
    found, stack = dict[str, Any](), list(names)
    while stack:
        name = stack.pop()
        if name in found or name not in nodes:  # as an argument of a function
            continue
        node = found[name] = nodes[name]
        if node.op != "StopGradient":
            inputs = [i for i in node.input if not i.startswith("^")]
            stack += map(_name, inputs[node.attr[VALUES].i :])
    return list(found.values())


def _name(connection: str) -> str:
    return connection.split(":")[0]


def _is_float(enum: int) -> bool:
    dtype = tf.as_dtype(enum) if enum else tf.int32
    return is_differentiable(dtype) or dtype in (tf.resource, tf.variant)
