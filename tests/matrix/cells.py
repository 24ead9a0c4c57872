"""The cells of the matrix: each runs one function under one transformation of TensorFlow."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from matrix.problem import (
    SLIPS,
    Case,
    Function,
    Outcome,
    Problem,
    as_list,
    complaint,
    is_loud,
    traced,
)


@dataclass(frozen=True)
class Cell:
    """One transformation: runs `f` on a problem and returns what came out."""

    name: str
    group: str
    run: Callable[[Function, Problem], Outcome]
    takes_members: bool = False
    order: int = 1
    rtol: float = 1e-9

    def problem(self, case: Case) -> Problem:
        """What of the case this cell runs on."""
        return case.members if self.takes_members else case.whole


CELLS: dict[str, Cell] = {}


def cell(name: str, group: str, **options: Any) -> Callable[[Any], Any]:
    """Registers a transformation."""

    def register(run: Callable[[Function, Problem], Outcome]) -> Any:
        assert name not in CELLS
        CELLS[name] = Cell(name, group, run, **options)
        return run

    return register


def promised(cell: Cell, case: Case) -> set[str]:
    """What a form of this library may do in a cell."""
    if cell.order > case.order or (cell.name == WITHOUT and not case.stored):
        return {"raises", "NaN"}
    return {"right"}


WITHOUT = "SavedModel without custom gradients"


def judge(cell: Cell, case: Case) -> str:
    """What a form does in a cell.

    `right`, `raises`, `NaN` (nothing finite), `None` (no gradient) or `wrong`.
    """
    problem = cell.problem(case)
    try:
        outcome = cell.run(case.form, problem)
    except SLIPS:
        raise
    except Exception:
        return "raises"
    if complaint(outcome, problem.expected, cell.rtol) is None:
        return "right"
    if is_loud({k: v for k, v in outcome.items() if k != "value"}):
        return "NaN"
    return "None" if any(g is None for came in outcome.values() for g in as_list(came)) else "wrong"


def tape(f: Function, args: Any, upstream: Any, *, persistent: bool = False) -> tuple[Any, Any]:
    """Value and pullback by one tape."""
    with tf.GradientTape(persistent=persistent) as t:
        t.watch(args)
        y = f(*args)
    return y, t.gradient(y, args, upstream)


@cell("eager tape", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*tape(f, _tensors(p.args), p.upstream))


@cell("persistent tape, asked twice", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    args = _tensors(p.args)
    with tf.GradientTape(persistent=True) as t:
        t.watch(args)
        y = f(*args)
    t.gradient(y, args, 3 * p.upstream)
    return _reverse(y, t.gradient(y, args, p.upstream))


@cell("`tf.Variable` arguments", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    variables = [tf.Variable(a) for a in p.args]
    with tf.GradientTape() as t:
        y = f(*variables)
    return _reverse(y, t.gradient(y, variables, p.upstream))


@cell("tape in `tf.function`", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*tf.function(tape)(f, _tensors(p.args), p.upstream))


@cell("tape around `tf.function`", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*tape(tf.function(f), _tensors(p.args), p.upstream))


@cell("tape in XLA", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*traced(tape, jit_compile=True)(f, _tensors(p.args), p.upstream))


@cell("tape around XLA", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*tape(traced(f, jit_compile=True), _tensors(p.args), p.upstream))


def _with_unknown_shapes(f: Function, p: Problem, known_rank: bool, **options: Any) -> Outcome:
    def run(*arrays: Any) -> Any:
        return tape(f, arrays[:-1], arrays[-1])

    arrays = [*p.args, p.upstream]
    signature = [tf.TensorSpec([None] * a.ndim if known_rank else None, tf.float64) for a in arrays]
    run = traced(run, input_signature=signature, **options)
    return _reverse(*run(*_tensors(arrays)))


@cell("unknown dimensions", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _with_unknown_shapes(f, p, known_rank=True)


@cell("unknown dimensions in XLA", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _with_unknown_shapes(f, p, known_rank=True, jit_compile=True)


@cell("unknown ranks", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _with_unknown_shapes(f, p, known_rank=False)


@cell("TF1 graph, `tf.gradients`", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        args = _tensors(p.args)
        y = f(*args)
        fetched = tf.gradients(y, args, p.upstream)
        if any(g is None for g in fetched):
            return {"value": session.run(y), "vjp": fetched}
        value, pulled = session.run((y, fetched))
    return {"value": value, "vjp": pulled}


@cell("`tf.recompute_grad`", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*tape(tf.recompute_grad(f), _tensors(p.args), p.upstream))


@cell("`tf.recompute_grad` in `tf.function`", "tapes")
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*traced(tape)(tf.recompute_grad(f), _tensors(p.args), p.upstream))


def _jacobian(f: Function, args: Any, pfor: bool = True) -> Any:
    with tf.GradientTape(persistent=True) as t:
        t.watch(args)
        y = f(*args)
    return t.jacobian(y, args, experimental_use_pfor=pfor)


def _batch_jacobian(f: Function, p: Problem, pfor: bool) -> Outcome:
    n = len(p.upstream)
    flat = [tf.reshape(a, [n, -1]) for a in p.args]  # batch_jacobian takes matrices
    with tf.GradientTape(persistent=True) as t:
        t.watch(flat)
        args = [tf.reshape(x, a.shape) for x, a in zip(flat, p.args, strict=True)]
        y = tf.reshape(_over_members(f)(*args), [n, -1])
    jacobians = _numpy([t.batch_jacobian(y, x, experimental_use_pfor=pfor) for x in flat])
    shapes = [p.upstream.shape + a.shape[1:] for a in p.args]
    return {"batch_jacobian": [j.reshape(s) for j, s in zip(jacobians, shapes, strict=True)]}


@cell("`tape.jacobian`", "Jacobians")
def _(f: Function, p: Problem) -> Outcome:
    return {"jacobian": _numpy(_jacobian(f, _tensors(p.args)))}


@cell("`tape.jacobian`, without pfor", "Jacobians")
def _(f: Function, p: Problem) -> Outcome:
    return {"jacobian": _numpy(_jacobian(f, _tensors(p.args), pfor=False))}


@cell("`tape.jacobian` in `tf.function`", "Jacobians")
def _(f: Function, p: Problem) -> Outcome:
    run = traced(_jacobian)
    return {"jacobian": _numpy(run(f, _tensors(p.args)))}


@cell("`tape.jacobian` in XLA", "Jacobians")
def _(f: Function, p: Problem) -> Outcome:
    run = traced(_jacobian, jit_compile=True)
    return {"jacobian": _numpy(run(f, _tensors(p.args)))}


@cell("`tape.batch_jacobian`", "Jacobians", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    return _batch_jacobian(f, p, pfor=True)


@cell("`tape.batch_jacobian`, without pfor", "Jacobians", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    return _batch_jacobian(f, p, pfor=False)


def _over_members(f: Function) -> Function:
    """All members by a Python loop, which no transformation can break."""
    return lambda *args: tf.stack(
        [f(*member) for member in zip(*map(tf.unstack, args), strict=True)]
    )


def _vectorized(f: Function) -> Function:
    return lambda *args: tf.vectorized_map(lambda member: f(*member), args)


@cell("tape around `vectorized_map`", "mapping", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*tape(_vectorized(f), _tensors(p.args), p.upstream))


@cell("tape around `vectorized_map`, all in `tf.function`", "mapping", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    return _reverse(*traced(tape)(_vectorized(f), _tensors(p.args), p.upstream))


@cell("tape around `vectorized_map` in XLA", "mapping", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    run = traced(tape, jit_compile=True)
    return _reverse(*run(_vectorized(f), _tensors(p.args), p.upstream))


@cell("`vectorized_map` around a tape", "mapping", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    def run(member: Any) -> Any:
        *args, upstream = member
        return tape(f, args, upstream)

    y, pulled = tf.vectorized_map(run, [*_tensors(p.args), tf.constant(p.upstream)])
    return _reverse(y, pulled)


@cell("`tf.map_fn`", "mapping", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    def mapped(*args: Any) -> Any:
        return tf.map_fn(lambda m: f(*m), args, fn_output_signature=tf.float64)

    return _reverse(*traced(tape)(mapped, _tensors(p.args), p.upstream))


@cell("`tf.scan`", "mapping", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    def scanned(*args: Any) -> Any:
        start = tf.zeros(p.upstream.shape[1:], tf.float64)
        # Sums so far, differenced: the state does depend on what came before.
        total = tf.scan(lambda s, m: s + f(*m), args, initializer=start)
        return total - tf.concat([start[tf.newaxis], total[:-1]], 0)

    return _reverse(*traced(tape)(scanned, _tensors(p.args), p.upstream))


@cell("`tf.while_loop`", "control flow")
def _(f: Function, p: Problem) -> Outcome:
    def looped(*args: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            return i + 1, y + f(*args) / 3

        start = tf.zeros(p.upstream.shape, tf.float64)
        return tf.while_loop(lambda i, y: i < 3, body, (0, start))[1]

    return _reverse(*traced(tape)(looped, _tensors(p.args), p.upstream))


@cell("tape around `tf.while_loop`", "control flow")
def _(f: Function, p: Problem) -> Outcome:
    @tf.function
    def looped(*args: Any) -> Any:
        y = tf.zeros(p.upstream.shape, tf.float64)
        for _ in tf.range(3):
            y += f(*args) / 3
        return y

    return _reverse(*tape(looped, _tensors(p.args), p.upstream))


@cell("`tf.cond`", "control flow")
def _(f: Function, p: Problem) -> Outcome:
    def branched(*args: Any) -> Any:
        return tf.cond(tf.reduce_sum(args[0]) < np.inf, lambda: f(*args), lambda: 0 * f(*args))

    return _reverse(*traced(tape)(branched, _tensors(p.args), p.upstream))


def _forward(f: Function, args: Any, tangents: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(args, tangents) as accumulator:
        y = f(*args)
    return y, accumulator.jvp(y)


def _pushed(y: Any, jvp: Any) -> Outcome:
    return {"value": y.numpy(), "jvp": _numpy([jvp])[0]}


@cell("`ForwardAccumulator` in eager", "forward mode")
def _(f: Function, p: Problem) -> Outcome:
    return _pushed(*_forward(f, _tensors(p.args), _tensors(p.tangents)))


@cell("`ForwardAccumulator` around `tf.function`", "forward mode")
def _(f: Function, p: Problem) -> Outcome:
    return _pushed(*_forward(traced(f), _tensors(p.args), _tensors(p.tangents)))


@cell("`ForwardAccumulator` in `tf.function`", "forward mode")
def _(f: Function, p: Problem) -> Outcome:
    return _pushed(*traced(_forward)(f, _tensors(p.args), _tensors(p.tangents)))


@cell("`ForwardAccumulator` in XLA", "forward mode")
def _(f: Function, p: Problem) -> Outcome:
    run = traced(_forward, jit_compile=True)
    return _pushed(*run(f, _tensors(p.args), _tensors(p.tangents)))


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


@cell("nested tapes", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    return {"hvp": _numpy(_hvp(f, p)(_tensors(p.args)))}


@cell("nested tapes in `tf.function`", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    return {"hvp": _numpy(traced(_hvp(f, p))(_tensors(p.args)))}


@cell("nested tapes in XLA", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    return {"hvp": _numpy(traced(_hvp(f, p), jit_compile=True)(_tensors(p.args)))}


@cell("nested tapes over a square", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    return {"hvp_of_square": _numpy(_hvp(f, p, square=True)(_tensors(p.args)))}


@cell("nested tapes over a square in `tf.function`", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    return {"hvp_of_square": _numpy(traced(_hvp(f, p, square=True))(_tensors(p.args)))}


def _forward_over_reverse(f: Function, args: Any, tangents: Any, upstream: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(args, tangents) as accumulator:
        _, pulled = tape(f, args, upstream)
    return accumulator.jvp(pulled)


@cell("forward over reverse", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    args, tangents = _tensors(p.args), _tensors(p.tangents)
    return {"hvp": _numpy(_forward_over_reverse(f, args, tangents, p.upstream))}


@cell("forward over reverse in `tf.function`", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    run = traced(_forward_over_reverse)
    return {"hvp": _numpy(run(f, _tensors(p.args), _tensors(p.tangents), p.upstream))}


@cell("inner tape inside a `tf.function`, outer around", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    args = _tensors(p.args)
    inner = traced(lambda args: tape(f, args, p.upstream)[1])
    return {"hvp": _numpy(tape(lambda *args: inner(args), args, _tensors(p.tangents))[1])}


@cell("nested tapes around a `tf.function`", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    return {"hvp": _numpy(_hvp(traced(f), p)(_tensors(p.args)))}


@cell("nested tapes over a square around a `tf.function`", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    run = _hvp(traced(f), p, square=True)
    return {"hvp_of_square": _numpy(run(_tensors(p.args)))}


@cell("nested tapes through `tf.while_loop`", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    def looped(*args: Any) -> Any:
        def body(i: Any, y: Any) -> Any:
            return i + 1, y + f(*args) / 3

        start = tf.zeros(p.upstream.shape, tf.float64)
        return tf.while_loop(lambda i, y: i < 3, body, (0, start), maximum_iterations=3)[1]

    return {"hvp": _numpy(traced(_hvp(looped, p))(_tensors(p.args)))}


@cell("nested tapes around `vectorized_map`", "second derivatives", order=2, takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    return {"hvp": _numpy(traced(_hvp(_vectorized(f), p))(_tensors(p.args)))}


@cell("`vectorized_map` around nested tapes", "second derivatives", order=2, takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    def run(member: Any) -> Any:
        n = len(p.args)
        one = Problem(p.truth, (), member[n], tuple(member[n + 1 :]), mapped=False)
        return _hvp(f, one)(member[:n])

    members = [*_tensors(p.args), tf.constant(p.upstream), *_tensors(p.tangents)]
    return {"hvp": _numpy(tf.vectorized_map(run, members))}


@cell("`tf.gradients` twice in a TF1 graph", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        args = _tensors(p.args)
        pulled = tf.gradients(f(*args), args, p.upstream)
        directional = tf.add_n(
            [tf.reduce_sum(g * t) for g, t in zip(pulled, p.tangents, strict=True) if g is not None]
        )
        return {"hvp": session.run(tf.gradients(directional, args))}


@cell("reverse over forward", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    tangents = _tensors(p.tangents)
    return {"hvp": _numpy(tape(lambda *a: _jvp(f, a, tangents), _tensors(p.args), p.upstream)[1])}


@cell("reverse over forward in `tf.function`", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    tangents = _tensors(p.tangents)
    run = traced(lambda args: tape(lambda *a: _jvp(f, a, tangents), args, p.upstream)[1])
    return {"hvp": _numpy(run(_tensors(p.args)))}


def _jvp(f: Function, args: Any, tangents: Any) -> Any:
    return _forward(f, list(args), tangents)[1]


def _twice(f: Function, args: Any, tangents: Any, upstream: Any) -> Any:
    with tf.autodiff.ForwardAccumulator(args, tangents) as accumulator:
        y = _jvp(f, args, tangents)
    return tf.reduce_sum(upstream * accumulator.jvp(y))


def _curvature(p: Problem, came: Any) -> Outcome:
    return {"curvature": _numpy([came])[0]}


@cell("forward over forward", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    return _curvature(p, _twice(f, _tensors(p.args), _tensors(p.tangents), p.upstream))


@cell("forward over forward in `tf.function`", "second derivatives", order=2)
def _(f: Function, p: Problem) -> Outcome:
    run = traced(_twice)
    return _curvature(p, run(f, _tensors(p.args), _tensors(p.tangents), p.upstream))


def _reloaded(f: Function, p: Problem, *, custom_gradients: bool) -> Function:
    module = tf.Module()
    module.f = traced(f, input_signature=[tf.TensorSpec(a.shape, tf.float64) for a in p.args])
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(
            module,
            folder,
            options=tf.saved_model.SaveOptions(experimental_custom_gradients=custom_gradients),
        )
        loaded = tf.saved_model.load(folder)
    return loaded.f


@cell("SavedModel with custom gradients", "stored and replicated")
def _(f: Function, p: Problem) -> Outcome:
    loaded = _reloaded(f, p, custom_gradients=True)
    return _reverse(*tape(loaded, _tensors(p.args), p.upstream))


@cell(WITHOUT, "stored and replicated")
def _(f: Function, p: Problem) -> Outcome:
    loaded = _reloaded(f, p, custom_gradients=False)
    return _reverse(*tape(loaded, _tensors(p.args), p.upstream))


@cell("TFLite, the value", "stored and replicated", rtol=1e-5)
def _(f: Function, p: Problem) -> Outcome:
    specs = [tf.TensorSpec(a.shape, tf.float32) for a in p.args]
    module = tf.Module()
    module.f = traced(f, input_signature=specs)
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


def _replicated(f: Function, p: Problem, wrap: Callable[[Any], Any]) -> Outcome:
    strategy = _strategy()
    n = len(p.upstream)

    def mine(array: Any) -> Any:
        def of(context: Any) -> Any:
            replica = context.replica_id_in_sync_group
            return tf.constant(array[replica * n // 2 : (replica + 1) * n // 2])

        return strategy.experimental_distribute_values_from_function(of)

    def step(args: Any, upstream: Any) -> Any:
        return tape(_over_members(f), args, upstream)

    run = wrap(lambda args, upstream: strategy.run(step, (args, upstream)))
    y, pulled = run([mine(a) for a in p.args], mine(p.upstream))
    values, *gradients = [
        tf.concat(strategy.experimental_local_results(t), 0) for t in [y, *pulled]
    ]
    return _reverse(values, gradients)


@cell("`MirroredStrategy` in eager", "stored and replicated", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    return _replicated(f, p, lambda run: run)


@cell("`MirroredStrategy` in `tf.function`", "stored and replicated", takes_members=True)
def _(f: Function, p: Problem) -> Outcome:
    return _replicated(f, p, traced)


def _reverse(y: Any, pulled: Any) -> Outcome:
    return {"value": y.numpy(), "vjp": _numpy(pulled)}


def _tensors(arrays: Any) -> list[Any]:
    return [tf.constant(a) for a in arrays]


def _numpy(tensors: Any) -> list[Any]:
    return [None if t is None else tf.convert_to_tensor(t).numpy() for t in tensors]
