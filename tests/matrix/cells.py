"""The cells of the matrix: each runs one function under one transformation of TensorFlow."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

from matrix.problem import LOUD, Case, Function, Outcome, Problem, traced, verdict

Run = Callable[[Function, Problem], Outcome]
Inside = Callable[[Function, Problem], Function]  # what is made of a function before
Around = Callable[[Any], Any]  # what the derivative is put into


@dataclass(frozen=True)
class Cell:
    """One transformation: runs `f` on a problem and returns what came out."""

    name: str
    group: str
    run: Run
    takes_members: bool = False
    order: int = 1
    rtol: float = 1e-9

    def problem(self, case: Case) -> Problem:
        """What of the case this cell runs on."""
        return case.members if self.takes_members else case.whole


def promised(cell: Cell, case: Case) -> set[str]:
    """What a form of this library may do in a cell."""
    if cell.order > case.order or (cell.name == WITHOUT and not case.stored):
        return LOUD
    return {"right"}


WITHOUT = "SavedModel without custom gradients"


def judge(cell: Cell, case: Case) -> str:
    """The verdict on a form in a cell."""
    problem = cell.problem(case)
    return verdict(lambda: cell.run(case.form, problem), problem.expected, cell.rtol, cell.rtol)


def _tensors(arrays: Any) -> list[Any]:
    return [tf.constant(a) for a in arrays]


def _numpy(tensors: Any) -> list[Any]:
    return [None if t is None else tf.convert_to_tensor(t).numpy() for t in tensors]


# What is made of the function, or put around its derivative.


def _same(f: Any, p: Any = None) -> Any:
    return f


def _by(wrap: Around) -> Inside:
    return lambda f, p: wrap(f)


xla = partial(traced, jit_compile=True)


def _over_members(f: Function, p: Any = None) -> Function:
    """All members by a Python loop, which no transformation can break."""
    return lambda *args: tf.stack(
        [f(*member) for member in zip(*map(tf.unstack, args), strict=True)]
    )


def _vectorized(f: Function, p: Any = None) -> Function:
    return lambda *args: tf.vectorized_map(lambda member: f(*member), args)


def _vectorized_over_unknown_size(f: Function, p: Problem) -> Function:
    signature = [tf.TensorSpec([None, *a.shape[1:]], tf.float64) for a in p.args]
    return traced(_vectorized(f), input_signature=signature)


def _by_map_fn(f: Function, p: Problem) -> Function:
    return lambda *args: tf.map_fn(lambda m: f(*m), args, fn_output_signature=tf.float64)


def _by_scan(f: Function, p: Problem) -> Function:
    def scanned(*args: Any) -> Any:
        start = tf.zeros(p.upstream.shape[1:], tf.float64)
        # Sums so far, differenced: the state does depend on what came before.
        total = tf.scan(lambda s, m: s + f(*m), args, initializer=start)
        return total - tf.concat([start[tf.newaxis], total[:-1]], 0)

    return scanned


def _looped(f: Function, p: Problem, **options: Any) -> Function:
    def run(*args: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            return i + 1, y + f(*args) / 3

        start = tf.zeros(p.upstream.shape, tf.float64)
        return tf.while_loop(lambda i, y: i < 3, body, (0, start), **options)[1]

    return run


def _looped_by_autograph(f: Function, p: Problem) -> Function:
    @tf.function
    def run(*args: Any) -> Any:
        y = tf.zeros(p.upstream.shape, tf.float64)
        for _ in tf.range(3):
            y += f(*args) / 3
        return y

    return run


def _branched(f: Function, p: Problem) -> Function:
    return lambda *args: tf.cond(
        tf.reduce_sum(args[0]) < np.inf, lambda: f(*args), lambda: 0 * f(*args)
    )


def _reloaded(f: Function, p: Problem, *, custom_gradients: bool) -> Function:
    module = tf.Module()
    module.f = traced(f, input_signature=[tf.TensorSpec(a.shape, tf.float64) for a in p.args])
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=custom_gradients)
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, options=options)
        loaded = tf.saved_model.load(folder)
    return loaded.f


# First derivatives.


def tape(f: Function, args: Any, upstream: Any) -> tuple[Any, Any]:
    """Value and pullback by one tape."""
    with tf.GradientTape() as t:
        t.watch(args)
        y = f(*args)
    return y, t.gradient(y, args, upstream)


def _pulled(y: Any, gradients: Any) -> Outcome:
    return {"value": y.numpy(), "vjp": _numpy(gradients)}


def reverse(inside: Inside = _same, around: Around = _same) -> Run:
    return lambda f, p: _pulled(*around(tape)(inside(f, p), _tensors(p.args), p.upstream))


def _asked_twice(f: Function, p: Problem) -> Outcome:
    args = _tensors(p.args)
    with tf.GradientTape(persistent=True) as t:
        t.watch(args)
        y = f(*args)
    t.gradient(y, args, 3 * p.upstream)
    return _pulled(y, t.gradient(y, args, p.upstream))


def _at_variables(f: Function, p: Problem) -> Outcome:
    variables = [tf.Variable(a) for a in p.args]
    with tf.GradientTape() as t:
        y = f(*variables)
    return _pulled(y, t.gradient(y, variables, p.upstream))


def of_unknown_shapes(known_rank: bool, around: Around = traced) -> Run:
    def run(f: Function, p: Problem) -> Outcome:
        arrays = [*p.args, p.upstream]
        shapes = [[None] * a.ndim if known_rank else None for a in arrays]
        signature = [tf.TensorSpec(shape, tf.float64) for shape in shapes]
        pull = around(lambda *all_: tape(f, all_[:-1], all_[-1]), input_signature=signature)
        return _pulled(*pull(*_tensors(arrays)))

    return run


def _in_a_graph(f: Function, p: Problem) -> Outcome:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        args = _tensors(p.args)
        y = f(*args)
        fetched = tf.gradients(y, args, p.upstream)
        if any(g is None for g in fetched):
            return {"value": session.run(y), "vjp": fetched}
        value, pulled = session.run((y, fetched))
    return {"value": value, "vjp": pulled}


def _jacobian(f: Function, args: Any, pfor: bool = True) -> Any:
    with tf.GradientTape(persistent=True) as t:
        t.watch(args)
        y = f(*args)
    return t.jacobian(y, args, experimental_use_pfor=pfor)


def jacobian(around: Around = _same, pfor: bool = True) -> Run:
    return lambda f, p: {
        "jacobian": _numpy(around(partial(_jacobian, pfor=pfor))(f, _tensors(p.args)))
    }


def batch_jacobian(pfor: bool) -> Run:
    def run(f: Function, p: Problem) -> Outcome:
        n = len(p.upstream)
        flat = [tf.reshape(a, [n, -1]) for a in p.args]  # batch_jacobian takes matrices
        with tf.GradientTape(persistent=True) as t:
            t.watch(flat)
            args = [tf.reshape(x, a.shape) for x, a in zip(flat, p.args, strict=True)]
            y = tf.reshape(_over_members(f)(*args), [n, -1])
        jacobians = _numpy([t.batch_jacobian(y, x, experimental_use_pfor=pfor) for x in flat])
        shapes = [p.upstream.shape + a.shape[1:] for a in p.args]
        return {"batch_jacobian": [j.reshape(s) for j, s in zip(jacobians, shapes, strict=True)]}

    return run


def _members_of_tapes(f: Function, p: Problem) -> Outcome:
    def run(member: Any) -> Any:
        *args, upstream = member
        return tape(f, args, upstream)

    return _pulled(*tf.vectorized_map(run, [*_tensors(p.args), tf.constant(p.upstream)]))


def _push(f: Function, args: Any, tangents: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(args, tangents) as accumulator:
        y = f(*args)
    return y, accumulator.jvp(y)


def forward(inside: Inside = _same, around: Around = _same) -> Run:
    def run(f: Function, p: Problem) -> Outcome:
        y, jvp = around(_push)(inside(f, p), _tensors(p.args), _tensors(p.tangents))
        return {"value": y.numpy(), "jvp": _numpy([jvp])[0]}

    return run


# Second derivatives.


def _hvp(f: Function, p: Problem, *, square: bool = False) -> Function:
    def hvp(args: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(args)
            with tf.GradientTape() as inner:
                inner.watch(args)
                y = f(*args)
                s = tf.reduce_sum(p.upstream * (y**2 / 2 if square else y))
            pulled = inner.gradient(s, args)
            directional = tf.add_n(
                [tf.reduce_sum(g * t) for g, t in zip(pulled, p.tangents, strict=True)]
            )
        return outer.gradient(directional, args)

    return hvp


def nested(inside: Inside = _same, around: Around = _same, square: bool = False) -> Run:
    key = "hvp_of_square" if square else "hvp"
    return lambda f, p: {
        key: _numpy(around(_hvp(inside(f, p), p, square=square))(_tensors(p.args)))
    }


def forward_over_reverse(around: Around = _same) -> Run:
    def run(f: Function, p: Problem) -> Outcome:
        pull = lambda *args: tape(f, args, p.upstream)[1]  # noqa: E731
        push = around(lambda args, tangents: _push(pull, args, tangents)[1])
        return {"hvp": _numpy(push(_tensors(p.args), _tensors(p.tangents)))}

    return run


def _inner_in_a_function(f: Function, p: Problem) -> Outcome:
    args = _tensors(p.args)
    inner = traced(lambda args: tape(f, args, p.upstream)[1])
    return {"hvp": _numpy(tape(lambda *args: inner(args), args, _tensors(p.tangents))[1])}


def _members_of_nested_tapes(f: Function, p: Problem) -> Outcome:
    def run(member: Any) -> Any:
        n = len(p.args)
        one = Problem(p.truth, (), member[n], tuple(member[n + 1 :]), mapped=False)
        return _hvp(f, one)(member[:n])

    members = [*_tensors(p.args), tf.constant(p.upstream), *_tensors(p.tangents)]
    return {"hvp": _numpy(tf.vectorized_map(run, members))}


def _twice_in_a_graph(f: Function, p: Problem) -> Outcome:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        args = _tensors(p.args)
        pulled = tf.gradients(f(*args), args, p.upstream)
        directional = tf.add_n(
            [tf.reduce_sum(g * t) for g, t in zip(pulled, p.tangents, strict=True) if g is not None]
        )
        return {"hvp": session.run(tf.gradients(directional, args))}


def _along(f: Function, tangents: Any) -> Function:
    return lambda *args: _push(f, list(args), tangents)[1]


def reverse_over_forward(around: Around = _same) -> Run:
    def run(f: Function, p: Problem) -> Outcome:
        pushed = _along(f, _tensors(p.tangents))
        pull = around(lambda args: tape(pushed, args, p.upstream)[1])
        return {"hvp": _numpy(pull(_tensors(p.args)))}

    return run


def forward_over_forward(around: Around = _same) -> Run:
    def run(f: Function, p: Problem) -> Outcome:
        def twice(args: Any, tangents: Any) -> Any:
            y = _push(lambda *args: _along(f, tangents)(*args), args, tangents)[1]
            return tf.reduce_sum(p.upstream * y)

        came = around(twice)(_tensors(p.args), _tensors(p.tangents))
        return {"curvature": _numpy([came])[0]}

    return run


# Stored and replicated.


def _lite(f: Function, p: Problem) -> Outcome:
    module = tf.Module()
    module.f = traced(f, input_signature=[tf.TensorSpec(a.shape, tf.float32) for a in p.args])
    concrete = [module.f.get_concrete_function()]
    flat = tf.lite.TFLiteConverter.from_concrete_functions(concrete, module).convert()
    interpreter = tf.lite.Interpreter(model_content=flat)
    interpreter.allocate_tensors()
    details = sorted(interpreter.get_input_details(), key=lambda d: d["name"])
    for detail, a in zip(details, p.args, strict=True):
        interpreter.set_tensor(detail["index"], a.astype(np.float32))
    interpreter.invoke()
    return {"value": interpreter.get_tensor(interpreter.get_output_details()[0]["index"])}


@cache
def _strategy() -> Any:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def replicated(around: Around = _same) -> Run:
    def run(f: Function, p: Problem) -> Outcome:
        strategy = _strategy()
        n = len(p.upstream)

        def mine(array: Any) -> Any:
            def of(context: Any) -> Any:
                replica = context.replica_id_in_sync_group
                return tf.constant(array[replica * n // 2 : (replica + 1) * n // 2])

            return strategy.experimental_distribute_values_from_function(of)

        def step(args: Any, upstream: Any) -> Any:
            return tape(_over_members(f), args, upstream)

        run_all = around(lambda args, upstream: strategy.run(step, (args, upstream)))
        y, pulled = run_all([mine(a) for a in p.args], mine(p.upstream))
        values, *gradients = [
            tf.concat(strategy.experimental_local_results(t), 0) for t in [y, *pulled]
        ]
        return _pulled(values, gradients)

    return run


MEMBERS = {"takes_members": True}
SECOND = {"order": 2}
_GROUPS: dict[str, list[tuple[Any, ...]]] = {
    "tapes": [
        ("eager tape", reverse()),
        ("persistent tape, asked twice", _asked_twice),
        ("`tf.Variable` arguments", _at_variables),
        ("tape in `tf.function`", reverse(around=tf.function)),
        ("tape around `tf.function`", reverse(_by(tf.function))),
        ("tape in XLA", reverse(around=xla)),
        ("tape around XLA", reverse(_by(xla))),
        ("unknown dimensions", of_unknown_shapes(known_rank=True)),
        ("unknown dimensions in XLA", of_unknown_shapes(known_rank=True, around=xla)),
        ("unknown ranks", of_unknown_shapes(known_rank=False)),
        ("TF1 graph, `tf.gradients`", _in_a_graph),
        ("`tf.recompute_grad`", reverse(_by(tf.recompute_grad))),
        ("`tf.recompute_grad` in `tf.function`", reverse(_by(tf.recompute_grad), traced)),
    ],
    "Jacobians": [
        ("`tape.jacobian`", jacobian()),
        ("`tape.jacobian`, without pfor", jacobian(pfor=False)),
        ("`tape.jacobian` in `tf.function`", jacobian(traced)),
        ("`tape.jacobian` in XLA", jacobian(xla)),
        ("`tape.batch_jacobian`", batch_jacobian(pfor=True), MEMBERS),
        ("`tape.batch_jacobian`, without pfor", batch_jacobian(pfor=False), MEMBERS),
    ],
    "mapping": [
        ("tape around `vectorized_map`", reverse(_vectorized), MEMBERS),
        ("tape around `vectorized_map`, all in `tf.function`", reverse(_vectorized, traced), MEMBERS),
        ("tape around `vectorized_map` in XLA", reverse(_vectorized, xla), MEMBERS),
        ("`vectorized_map` around a tape", _members_of_tapes, MEMBERS),
        ("`tf.map_fn`", reverse(_by_map_fn, traced), MEMBERS),
        ("`tf.scan`", reverse(_by_scan, traced), MEMBERS),
    ],
    "control flow": [
        ("`tf.while_loop`", reverse(_looped, traced)),
        ("tape around `tf.while_loop`", reverse(_looped_by_autograph)),
        ("`tf.cond`", reverse(_branched, traced)),
    ],
    "forward mode": [
        ("`ForwardAccumulator` in eager", forward()),
        ("`ForwardAccumulator` around `tf.function`", forward(_by(traced))),
        ("`ForwardAccumulator` in `tf.function`", forward(around=traced)),
        ("`ForwardAccumulator` in XLA", forward(around=xla)),
        ("`ForwardAccumulator` around `vectorized_map`", forward(_vectorized), MEMBERS),
        ("`ForwardAccumulator` around `vectorized_map` of unknown size", forward(_vectorized_over_unknown_size), MEMBERS),
    ],
    "second derivatives": [
        ("nested tapes", nested(), SECOND),
        ("nested tapes in `tf.function`", nested(around=traced), SECOND),
        ("nested tapes in XLA", nested(around=xla), SECOND),
        ("nested tapes over a square", nested(square=True), SECOND),
        ("nested tapes over a square in `tf.function`", nested(around=traced, square=True), SECOND),
        ("forward over reverse", forward_over_reverse(), SECOND),
        ("forward over reverse in `tf.function`", forward_over_reverse(traced), SECOND),
        ("inner tape inside a `tf.function`, outer around", _inner_in_a_function, SECOND),
        ("nested tapes around a `tf.function`", nested(_by(traced)), SECOND),
        ("nested tapes over a square around a `tf.function`", nested(_by(traced), square=True), SECOND),
        ("nested tapes through `tf.while_loop`", nested(partial(_looped, maximum_iterations=3), traced), SECOND),
        ("nested tapes around `vectorized_map`", nested(_vectorized, traced), SECOND | MEMBERS),
        ("`vectorized_map` around nested tapes", _members_of_nested_tapes, SECOND | MEMBERS),
        ("`tf.gradients` twice in a TF1 graph", _twice_in_a_graph, SECOND),
        ("reverse over forward", reverse_over_forward(), SECOND),
        ("reverse over forward in `tf.function`", reverse_over_forward(traced), SECOND),
        ("forward over forward", forward_over_forward(), SECOND),
        ("forward over forward in `tf.function`", forward_over_forward(traced), SECOND),
    ],
    "stored and replicated": [
        ("SavedModel with custom gradients", reverse(partial(_reloaded, custom_gradients=True))),
        (WITHOUT, reverse(partial(_reloaded, custom_gradients=False))),
        ("TFLite, the value", _lite, {"rtol": 1e-5}),
        ("`MirroredStrategy` in eager", replicated(), MEMBERS),
        ("`MirroredStrategy` in `tf.function`", replicated(traced), MEMBERS),
    ],
}  # fmt: skip
CELLS = {
    name: Cell(name, group, run, **(options[0] if options else {}))
    for group, cells in _GROUPS.items()
    for name, run, *options in cells
}
