"""Where everything runs, on which device.

`matrix.configure` makes three logical CPUs. The tests marked `gpu` are the same on a GPU.
"""

import contextlib
from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context  # run metadata: where ops of a function ran
from tensorflow.python.framework import op_callbacks

import sgtrick
from shared import WRAPS

GPU = pytest.param(
    "GPU:0",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="no GPU is visible"),
    ],
)
DEVICES = pytest.mark.parametrize("device", ["CPU:1", GPU])
X = np.array([[0.3, -1.2, 2.0], [1.5, 0.1, -0.7]], np.float32)
UPSTREAM = np.array([1.25, -0.5], np.float32)


def value(x):
    return tf.reduce_sum(tf.sin(x) * x, -1)


def gradient(x):
    return tf.cos(x) * x + tf.sin(x)


def hessian(x):
    return tf.linalg.diag(2 * tf.cos(x) - tf.sin(x) * x)


def values(x, **options):
    return sgtrick.custom_gradient(value(x), gradient(x), x, **options)


def with_hessian(x, **options):
    return sgtrick.custom_gradient(value(x), gradient(x), x, hx=hessian(x), **options)


def manually_stopped(x, **options):
    s = tf.stop_gradient(x)
    return sgtrick.custom_gradient(value(s), gradient(s), x, True, **options)


def with_gradient(x, **options):
    return sgtrick.with_gradient(value, gradient, **options)(x)


def both(x):
    return value(x), gradient(x)


def from_value_and_gradient(x, **options):
    return sgtrick.from_value_and_gradient(both, **options)(x)


def with_variables(x):
    scale = tf.constant(1.0)

    def grad(x, variables):
        return gradient(x) * scale, []

    return sgtrick.with_gradient(value, grad)(x)


@sgtrick.custom_vjp
def custom_vjp(x):
    return value(x), lambda u: u[:, None] * gradient(x)


@sgtrick.custom_jvp
def custom_jvp(x):
    return value(x)


@custom_jvp.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return custom_jvp(x), tf.reduce_sum(gradient(x) * t, -1)


def engine(x):
    return np.sum(np.sin(x) * x, -1), np.cos(x) * x + np.sin(x)


from_numpy = sgtrick.from_numpy(engine)


def implicit_root(x):
    return tf.reduce_sum(sgtrick.implicit_root(lambda r, x: r**3 - x, tf.sign(x) * tf.abs(x) ** (1 / 3), x), -1)  # fmt: skip


class Form(NamedTuple):
    h: object
    takes_device: bool = False
    pullback: bool = False  # its backward is placed by itself


FORMS = {
    "values": Form(values, True, True),
    "values, Hessian": Form(with_hessian, True),
    "values, stopped by hand": Form(manually_stopped, True),
    "with_gradient": Form(with_gradient, True, True),
    "with_gradient, variables": Form(with_variables, False, True),
    "from_value_and_gradient": Form(from_value_and_gradient, True, True),
    "custom_vjp": Form(custom_vjp, False, True),
    "custom_jvp": Form(custom_jvp),
    "from_numpy": Form(from_numpy, False, True),
    "straight_through": Form(
        lambda x: tf.reduce_sum(sgtrick.straight_through(tf.round(x), x) * x, -1)
    ),
    "stop_gradient": Form(lambda x: tf.reduce_sum(sgtrick.stop_gradient(x, where=X > 0) * x, -1)),
    "clip_gradient": Form(lambda x: tf.reduce_sum(sgtrick.clip_gradient(x, -1, 1), -1)),
    "implicit_root": Form(implicit_root),
}
BY_ARGUMENT = {name: form for name, form in FORMS.items() if form.takes_device}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
EVERY_THAT_TAKES_DEVICE = pytest.mark.parametrize("form", BY_ARGUMENT.values(), ids=BY_ARGUMENT)


def in_scope(form, device):
    """The form in a `tf.device` scope, which is left before any gradient is asked for."""

    def h(x):
        with tf.device(device):
            return form.h(x)

    return h


@contextlib.contextmanager
def watched_ops():
    """Yields a list to which every op that runs eagerly adds `(type, its device, inputs')`."""
    ran = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None:
            devices = {i.device for i in inputs if i.dtype != tf.int32}  # shapes may be on the host
            ran.append((op_type, {o.device for o in outputs}, devices))

    op_callbacks.add_op_callback(callback)
    try:
        yield ran
    finally:
        op_callbacks.remove_op_callback(callback)


def is_on(device, *there):
    return all(name.endswith(device) for name in there)


def pull(h, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = h(x)
    return y, tape.gradient(y, x, tf.constant(UPSTREAM))


def operations(run, *args):
    return tf.function(run).get_concrete_function(*args).graph.get_operations()


def computing(ops):
    """Without what computes nothing; in the place of a call that is not placed, its body."""
    for op in ops:
        if op.type == "PartitionedCall" and not op.device:
            function = op.graph._get_function(op.get_attr("f").name)
            yield from computing(function.graph.get_operations())
        elif op.type not in ("Placeholder", "Const", "Identity", "NoOp", "ZerosLike"):
            yield op


class TestForward:
    @EVERY
    @DEVICES
    def test_eager(self, form, device):
        x = tf.constant(X)
        with watched_ops() as ran, tf.GradientTape() as tape:  # nobody would have to be told else
            tape.watch(x)
            y = in_scope(form, device)(x)
        assert ran
        assert all(is_on(device, *outputs) for _, outputs, _ in ran)
        assert is_on(device, y.device)

    @EVERY
    @DEVICES
    def test_graph(self, form, device):
        ops = operations(in_scope(form, device), tf.TensorSpec(X.shape))
        host = [op for op in ops if "PyFunc" in op.type or op.type == "EnsureShape"]
        others = [op for op in computing(ops) if op not in host]
        assert others
        assert all(is_on(device, op.device) for op in others), {op.type: op.device for op in others}
        assert all(is_on("CPU:0", op.device) for op in host)

    @EVERY_THAT_TAKES_DEVICE
    @DEVICES
    def test_argument_in_eager(self, form, device):
        with tf.device("CPU:0"):  # the argument counts more than the scope
            y, g = pull(partial(form.h, device=device), tf.constant(X))
        assert is_on(device, y.device)
        assert not form.pullback or is_on(device, g.device)

    @EVERY_THAT_TAKES_DEVICE
    @DEVICES
    def test_argument_in_a_graph(self, form, device):
        def run(x):
            with tf.device("CPU:0"):
                return form.h(x, device=device)

        ops = list(computing(operations(run, tf.TensorSpec(X.shape))))
        # What the arguments of custom_gradient are made of stays where the caller has it.
        trick = [op for op in ops if op.name.startswith("custom_gradient/")] or ops
        assert trick
        assert all(is_on(device, op.device) for op in trick), {op.type: op.device for op in trick}

    @EVERY_THAT_TAKES_DEVICE
    def test_absent_device(self, form):
        with pytest.raises(ValueError, match=r"'CPU:7' is not present.*'CPU:0', 'CPU:1'"):
            form.h(tf.constant(X), device="CPU:7")


class TestBackward:
    @EVERY
    @DEVICES
    def test_eager(self, form, device):
        x = tf.constant(X)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = in_scope(form, device)(x)
        upstream = tf.constant(UPSTREAM)
        with watched_ops() as ran, contextlib.ExitStack() as stack:
            if not form.pullback:
                stack.enter_context(tf.device(device))
            g = tape.gradient(y, x, upstream)
        assert ran
        assert all(is_on(device, *outputs) for _, outputs, _ in ran), ran
        assert is_on(device, g.device)

    @EVERY
    @DEVICES
    def test_tape_in_a_graph(self, form, device):
        mark = {}

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = in_scope(form, device)(x)
            graph = tf.compat.v1.get_default_graph()
            mark["before"] = set(graph.get_operations())
            with tf.device(None if form.pullback else device):
                g = tape.gradient(y, x, tf.constant(UPSTREAM))
            return g

        ops = operations(run, tf.TensorSpec(X.shape))
        ops = list(computing(op for op in ops if op not in mark["before"]))
        assert ops
        assert all(is_on(device, op.device) for op in ops), {op.type: op.device for op in ops}

    @EVERY
    @DEVICES
    def test_tape_around_a_graph(self, form, device):
        x, h = tf.constant(X), tf.function(in_scope(form, device))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x)
        with tf.device(device):
            g = tape.gradient(y, x, tf.constant(UPSTREAM))
        assert is_on(device, g.device)

    @pytest.mark.parametrize(
        ("h", "op"),
        [
            (custom_vjp, "Cos"),
            (with_variables, "MulNoNan"),
            (lambda x: tf.reduce_sum(sgtrick.clip_gradient(x, -1, 1), -1), "Maximum"),
        ],
        ids=["custom_vjp", "with_gradient, variables", "clip_gradient"],
    )
    def test_overrides_stay_pullbacks_under_a_tape_around_a_graph(self, h, op):
        x, run = tf.constant(X), tf.function(in_scope(Form(h), "CPU:1"))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = run(x)
        nodes = nodes_of(lambda: tape.gradient(y, x, tf.constant(UPSTREAM)))
        assert {node.device[-5:] for node in nodes if node.op == op} == {"CPU:1"}

    @EVERY
    def test_colocated_in_a_tf1_graph(self, form):
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, X.shape)
            y = in_scope(form, "CPU:1")(x)
            before = set(graph.get_operations())
            tf.compat.v1.gradients(y, x, tf.constant(UPSTREAM), colocate_gradients_with_ops=True)
            ops = [op for op in graph.get_operations() if op not in before]
        groups = {g for op in ops for g in op.colocation_groups()}
        assert groups - {b"loc:@" + op.name.encode() for op in ops}  # with ops of the forward


class TestPlacementChangesNothing:
    @EVERY
    @WRAPS
    def test_bit_for_bit(self, form, wrap):
        x = tf.constant(X)
        came = [wrap(partial(pull, in_scope(form, d)))(x) for d in ("CPU:0", "CPU:1")]
        with tf.device("CPU:1"):
            came.append(wrap(partial(pull, form.h))(x))
        if form.takes_device:
            came.append(wrap(partial(pull, partial(form.h, device="CPU:1")))(x))
        for y, g in came[1:]:
            assert y.numpy().tobytes() == came[0][0].numpy().tobytes()
            assert g.numpy().tobytes() == came[0][1].numpy().tobytes()

    @EVERY_THAT_TAKES_DEVICE
    @DEVICES
    def test_variables_stay(self, form, device):
        with tf.device("CPU:0"):
            variable = tf.Variable(X)
        with tf.GradientTape() as tape:
            y = form.h(variable, device=device)
        g = tape.gradient(y, variable, tf.constant(UPSTREAM))
        variable.assign_sub(0.1 * g)
        assert is_on("CPU:0", variable.device)
        assert is_on(device, y.device)
        np.testing.assert_allclose(variable, X - 0.1 * UPSTREAM[:, None] * gradient(X), rtol=1e-5)


class TestHostCallback:
    """`x` to the host once, value and gradient back once."""

    @DEVICES
    def test_copies_in_eager(self, device, monkeypatch):
        with tf.device(device):
            x = tf.constant(X)
        to_host = []
        numpy = type(x).numpy
        monkeypatch.setattr(type(x), "numpy", lambda t: to_host.append(t) or numpy(t))
        with watched_ops() as ran, tf.device(device):
            y, g = pull(from_numpy, x)
        assert len(to_host) == 1
        assert is_on(device, y.device, g.device)
        assert all(is_on(device, *inputs) for _, _, inputs in ran), ran

    @DEVICES
    def test_copies_in_a_graph(self, device):
        with tf.device(device):
            x = tf.constant(X)
            nodes = nodes_of(lambda: tf.function(partial(pull, from_numpy))(x))
        (host,) = [node for node in nodes if node.op == "PyFuncStateless"]
        assert is_on("CPU:0", host.device)
        copied = Counter(
            (node.attr["send_device"].s.decode()[-5:], node.attr["recv_device"].s.decode()[-5:])
            for node in nodes
            if node.op == "_Send"
        )
        assert copied == {(device, "CPU:0"): 1, ("CPU:0", device): 2}

    def test_runs_where_soft_placement_is_off(self):
        before = tf.config.get_soft_device_placement()
        tf.config.set_soft_device_placement(False)
        try:
            y, _ = tf.function(partial(pull, in_scope(FORMS["from_numpy"], "CPU:1")))(
                tf.constant(X)
            )
        finally:
            tf.config.set_soft_device_placement(before)
        np.testing.assert_allclose(y, value(X), rtol=1e-6)


def nodes_of(run):
    """The nodes of the graphs that TensorFlow made of the functions that ran, one per device."""
    context.context().enable_run_metadata()
    context.context().export_run_metadata()  # of what ran before: TensorFlow keeps collecting
    try:
        run()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    return [node for f in metadata.function_graphs for g in f.partition_graphs for node in g.node]
