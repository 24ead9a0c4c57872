"""Where everything runs, on which device.

`matrix.configure` makes three logical CPUs. The tests marked `gpu` are the same on a GPU.
"""

import contextlib
import subprocess
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context  # run metadata: where ops of a function ran
from tensorflow.python.framework import op_callbacks

import sgtrick
from matrix import spread
from shared import EXECUTED

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


def clipped(x):
    return tf.reduce_sum(sgtrick.clip_gradient(x, -1, 1), -1)


TAKE_DEVICE = {
    "values": lambda x, **options: sgtrick.custom_gradient(value(x), gradient(x), x, **options),
    "values, Hessian": lambda x, **options: sgtrick.custom_gradient(
        value(x), gradient(x), x, hx=hessian(x), **options
    ),
    "with_gradient": lambda x, **options: sgtrick.with_gradient(value, gradient, **options)(x),
    "from_value_and_gradient": lambda x, **options: sgtrick.from_value_and_gradient(
        lambda x: (value(x), gradient(x)), **options
    )(x),
}
FORMS = TAKE_DEVICE | {
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "from_numpy": from_numpy,
    "straight_through": lambda x: tf.reduce_sum(sgtrick.straight_through(tf.round(x), x) * x, -1),
    "stop_gradient": lambda x: tf.reduce_sum(sgtrick.stop_gradient(x, where=X > 0) * x, -1),
    "clip_gradient": clipped,
    "implicit_root": implicit_root,
}
# Those whose backward is placed by itself.
PULLBACKS = TAKE_DEVICE.keys() - {"values, Hessian"} | {"custom_vjp", "from_numpy"}
EVERY = pytest.mark.parametrize("name", FORMS)
EVERY_THAT_TAKES_DEVICE = pytest.mark.parametrize("name", TAKE_DEVICE)


def in_scope(h, device):
    """The form in a `tf.device` scope, which is left before any gradient is asked for."""

    def run(x):
        with tf.device(device):
            return h(x)

    return run


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


def insist_on(device, ops):
    """All operations of a graph are there, but for calls of the host."""
    host = [op for op in ops if "PyFunc" in op.type or op.type == "EnsureShape"]
    others = [op for op in computing(ops) if op not in host]
    assert others
    assert all(is_on(device, op.device) for op in others), {op.type: op.device for op in others}
    assert all(is_on("CPU:0", op.device) for op in host)


@DEVICES
class TestPlaced:
    @EVERY
    def test_eager(self, name, device):
        x, upstream = tf.constant(X), tf.constant(UPSTREAM)
        with watched_ops() as ran, tf.GradientTape() as tape:  # nobody would have to be told else
            tape.watch(x)
            y = in_scope(FORMS[name], device)(x)
        with watched_ops() as ran_back, tf.device(None if name in PULLBACKS else device):
            g = tape.gradient(y, x, upstream)
        for run in (ran, ran_back):
            assert run or name == "from_numpy"  # whose value the host alone computes
            assert all(is_on(device, *outputs) for _, outputs, _ in run), run
        assert is_on(device, y.device, g.device)

    @EVERY
    def test_graph(self, name, device):
        h, forward = in_scope(FORMS[name], device), []
        insist_on(device, operations(h, tf.TensorSpec(X.shape)))

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = h(x)
            forward.extend(tf.compat.v1.get_default_graph().get_operations())
            with tf.device(None if name in PULLBACKS else device):
                return tape.gradient(y, x, tf.constant(UPSTREAM))

        ops = operations(run, tf.TensorSpec(X.shape))
        insist_on(device, [op for op in ops if op not in forward])

    @EVERY
    def test_tape_around_a_graph(self, name, device):
        x, h = tf.constant(X), tf.function(in_scope(FORMS[name], device))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = h(x)
        with tf.device(device):
            g = tape.gradient(y, x, tf.constant(UPSTREAM))
        assert is_on(device, g.device)

    @EVERY_THAT_TAKES_DEVICE
    def test_by_the_argument(self, name, device):
        """Which counts more than the scope; variables stay where they are."""
        h = partial(FORMS[name], device=device)
        with tf.device("CPU:0"):
            y, g = pull(h, tf.constant(X))
            v = tf.Variable(X)
            _, by_v = pull(h, v)
        assert is_on(device, y.device)
        assert name not in PULLBACKS or is_on(device, g.device)
        v.assign_sub(0.1 * by_v)
        assert is_on("CPU:0", v.device)
        np.testing.assert_allclose(v, X - 0.1 * UPSTREAM[:, None] * gradient(X), rtol=1e-5)

    @EVERY_THAT_TAKES_DEVICE
    def test_by_the_argument_in_a_graph(self, name, device):
        h = in_scope(partial(FORMS[name], device=device), "CPU:0")
        ops = operations(h, tf.TensorSpec(X.shape))
        # What the arguments of custom_gradient are made of stays where the caller has it.
        insist_on(device, [op for op in ops if op.name.startswith("custom_gradient/")] or ops)


class TestOverrides:
    @pytest.mark.parametrize(("h", "op"), [(custom_vjp, "Cos"), (clipped, "Maximum")])
    def test_stay_pullbacks_under_a_tape_around_a_graph(self, h, op):
        x, run = tf.constant(X), tf.function(in_scope(h, "CPU:1"))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = run(x)
        nodes = nodes_of(lambda: tape.gradient(y, x, tf.constant(UPSTREAM)))
        assert {node.device[-5:] for node in nodes if node.op == op} == {"CPU:1"}

    @EVERY
    def test_colocated_in_a_tf1_graph(self, name):
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, X.shape)
            y = in_scope(FORMS[name], "CPU:1")(x)
            before = set(graph.get_operations())
            tf.compat.v1.gradients(y, x, tf.constant(UPSTREAM), colocate_gradients_with_ops=True)
            ops = [op for op in graph.get_operations() if op not in before]
        groups = {g for op in ops for g in op.colocation_groups()}
        assert groups - {b"loc:@" + op.name.encode() for op in ops}  # with ops of the forward


@pytest.mark.parametrize(("name", "wrap"), spread(FORMS, EXECUTED, together=1))
def test_placement_changes_no_bit(name, wrap):
    h, wrap, x = FORMS[name], EXECUTED[wrap], tf.constant(X)
    came = [wrap(partial(pull, in_scope(h, d)))(x) for d in ("CPU:0", "CPU:1")]
    with tf.device("CPU:1"):
        came.append(wrap(partial(pull, h))(x))
    if name in TAKE_DEVICE:
        came.append(wrap(partial(pull, partial(h, device="CPU:1")))(x))
    assert len({tuple(t.numpy().tobytes() for t in both) for both in came}) == 1


ABSENT = ["CPU:7", "/job:worker/task:3/device:CPU:0", "/task:1/CPU:0", "/replica:2/CPU:0"]


@pytest.mark.parametrize(("name", "device"), spread(TAKE_DEVICE, ABSENT, together=1))
def test_absent_device(name, device):
    """TensorFlow's soft placement would use another one without a word."""
    with pytest.raises(ValueError, match=f"'{device}' is not present.*'CPU:0', 'CPU:1'"):
        FORMS[name](tf.constant(X), device=device)


@pytest.mark.long
def test_dtensor():
    """In a program of its own: its mesh is a device of all that comes later."""
    subprocess.run([sys.executable, "-c", PROGRAM_WITH_A_MESH], check=True)


PROGRAM_WITH_A_MESH = """
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

import sgtrick

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, 2 * [tf.config.LogicalDeviceConfiguration()])
dtensor.initialize_accelerator_system("CPU")
mesh = dtensor.create_mesh([("batch", 2)], devices=["CPU:0", "CPU:1"])
layout = dtensor.Layout.replicated(mesh, 1)
point = np.array([0.5, 1.5], np.float32)
x = dtensor.copy_to_mesh(tf.constant(point), layout)
forms = [
    sgtrick.custom_vjp(lambda x: (tf.sin(x), lambda u: u * tf.cos(x))),
    sgtrick.with_gradient(tf.sin, lambda x: tf.cos(x)),
]
for form in forms:
    with dtensor.default_mesh(mesh), tf.GradientTape() as tape:
        tape.watch(x)
        y = form(x)
        gradient = tape.gradient(tf.reduce_sum(y**2), x)
    for found, expected in (y, np.sin), (gradient, lambda x: np.sin(2 * x)):
        assert dtensor.fetch_layout(found) == layout
        np.testing.assert_allclose(dtensor.unpack(found)[1], expected(point), rtol=1e-6)
"""


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
            y = tf.function(in_scope(from_numpy, "CPU:1"))(tf.constant(X))
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
