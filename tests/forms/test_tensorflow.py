"""TensorFlow's private names, each looked up, and doing what `sgtrick._core` builds on.

A failure here names what a new version of TensorFlow has taken away or changed.
"""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import gradients_util
from tensorflow.python.ops.parallel_for import pfor as pfor_lib

import sgtrick
from sgtrick._tensorflow import pfor, tapes

PLACES = [
    "tensorflow.python.pywrap_tfe.TFE_Py_TapeSetIsStopped",
    "tensorflow.python.pywrap_tfe.TFE_Py_TapeSetRestartOnThread",
    "tensorflow.python.pywrap_tfe.TFE_Py_TapeSetStopOnThread",
    "tensorflow.python.eager.record.could_possibly_record",
    "tensorflow.python.eager.record.record_operation",
    "tensorflow.python.eager.record.should_record_backprop",
    "tensorflow.python.eager.record.stop_recording",
    "tensorflow.python.eager.record.VariableWatcher",
    "tensorflow.python.eager.context.Context.add_op_callback",
    "tensorflow.python.eager.context.Context.remove_op_callback",
    "tensorflow.python.eager.execute.execute_with_callbacks",
    "tensorflow.python.eager.forwardprop_util.pack_tangents",
    "tensorflow.python.framework.func_graph.FuncGraph.capture",
    "tensorflow.python.framework.ops.EagerTensor",
    "tensorflow.python.framework.ops.get_gradient_function",
    "tensorflow.python.framework.ops.gradient_registry._registry",
    "tensorflow.python.framework.ops.gradient_registry.lookup",
    "tensorflow.python.framework.ops.tensor_id",
    "tensorflow.python.framework.ops.uid",
    "tensorflow.python.ops.control_flow_util.GraphOrParentsInXlaContext",
    "tensorflow.python.ops.control_flow_v2_func_graphs.ControlFlowFuncGraph",
    "tensorflow.python.ops.gradients_util._GradientsHelper",
    "tensorflow.python.ops.handle_data_util.get_resource_handle_data",
    "tensorflow.python.ops.parallel_for.control_flow_ops._pfor_impl",
    "tensorflow.python.ops.parallel_for.pfor.PFor._convert_helper",
    "tensorflow.python.ops.parallel_for.pfor.PFor.loop_len_vector",
    "tensorflow.python.ops.parallel_for.pfor._stack",
    "tensorflow.python.ops.parallel_for.pfor.wrap",
    "tensorflow.python.ops.resource_variable_ops.variable_accessed",
    "tensorflow.__internal__.autograph.control_status_ctx",
    "tensorflow.__internal__.autograph.tf_convert",
    "tensorflow.Graph._attr_scope",
    "tensorflow.Graph.gradient_override_map",
    "tensorflow.Graph.num_operations",
    "tensorflow.raw_ops.PreventGradient",
]


def find(path):
    """The object at a dotted path, of which the longest possible part is a module."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for part in parts[n:]:
            found = getattr(found, part)
        return found
    raise ImportError(path)


@pytest.mark.parametrize("path", PLACES)
def test_is_there(path):
    try:
        find(path)
    except (AttributeError, ImportError) as e:
        pytest.fail(f"TensorFlow {tf.__version__} no longer has {path}: {e}")


def test_nothing_else_touches_private_names():
    package = Path(sgtrick.__file__).parent
    names = [path.rpartition(".")[2] for path in PLACES if "tensorflow.python" not in path]
    names += ["_forward_graph", "_handle_data", "_indirect_captures", "_parent_trackable"]
    private = re.compile("|".join(["tensorflow.python", "__internal__", *names]))
    touching = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if private.search(path.read_text())
    }
    assert touching
    assert all(path.startswith("_tensorflow/") for path in touching), touching


def test_parameters():
    """Positions and names that `sgtrick._tensorflow` passes."""
    parameters = list(inspect.signature(record.record_operation).parameters)
    assert parameters[4:5] == ["forward_function"]
    assert "src_graph" in inspect.signature(gradients_util._GradientsHelper).parameters


class TestRecording:
    def test_an_operation_with_two_derivatives(self):
        """`record_operation` takes a pullback and, after it, the function for forward mode."""
        x, y = tf.constant(1.0), tf.constant(2.0)
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as acc, tf.GradientTape() as tape:
            tape.watch(x)
            tapes.record_override([y], [x], lambda u: [3 * u], lambda t: [5 * t])
        assert tape.gradient(y, x).numpy() == 3
        assert acc.jvp(y).numpy() == 5, "record_operation ignores its forward_function"

    def test_suspended(self):
        x = tf.constant(2.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            with tapes.not_recording():
                before = x * 3
                with tapes.recording():
                    resumed = x * 5
                after = x * 7
        found = [tape.gradient(y, x) for y in (before, resumed, after)]
        assert found[1] is not None, "TFE_Py_TapeSetRestartOnThread no longer resumes tapes"
        assert found[1].numpy() == 5
        assert found[0] is None, "stop_recording no longer stops tapes"
        assert found[2] is None, "TFE_Py_TapeSetStopOnThread no longer stops tapes"

    def test_accumulators_silence_tapes(self):
        x, y = tf.constant(1.0), tf.constant(2.0)
        assert not tapes.tapes_are_silenced()
        seen = []

        def push(t):
            seen.append(tapes.tapes_are_silenced())
            seen.append(tapes.in_thread(tapes.tapes_are_silenced))
            return [t]

        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as acc:
            tapes.record_override([y], [x], lambda u: [u], push)
        acc.jvp(y)
        assert seen[:2] == [True, False], "a tape's state is no longer that of its thread"


class TestWhoAsked:
    def test_sources_are_in_the_frame_of_the_tape(self):
        x, other, y = tf.constant(1.0), tf.constant(2.0), tf.constant(3.0)
        v = tf.Variable(1.0)
        answers = []

        def pull(u):
            answers.append([tapes.asked_for(t) for t in (x, other)])
            return [u, u]

        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, other])
            tapes.record_override([y], [x, other], pull, lambda *ts: [ts[0]])
        assert not tapes.asked_for(x)
        for sources in (x, [other], {"a": [x], "b": (other, v)}):
            tape.gradient(y, sources)
        assert answers == [[True, False], [False, True], [True, True]], (
            "GradientTape.gradient has no local variable `sources` that holds what was asked for"
        )


def test_an_operation_brings_its_converter():
    called = []

    def convert(pfor_input):
        called.append(pfor_input.op.type)
        (x,) = pfor_input.inputs
        assert x.is_stacked, "pfor's inputs no longer say whether they are stacked"
        return [pfor_lib.wrap(100 * x.t, True)]

    def f(x):
        y = tf.raw_ops.PreventGradient(input=x, message="no rule of TensorFlow's")
        y.op.pfor_converter = convert
        return y

    y = tf.vectorized_map(f, tf.constant([1.0, 2.0]), fallback_to_while_loop=False)
    assert called, "pfor no longer looks for the attribute pfor_converter of an operation"
    assert y.numpy().tolist() == [100, 200]


def test_the_index_of_a_member_is_in_the_frame_that_traces():
    found = []

    def f(x):
        found.extend(pfor.member_indices())
        return x

    tf.vectorized_map(f, tf.constant([1.0, 2.0]))
    (index,) = found
    assert index.op.type == "PlaceholderWithDefault", "_pfor_impl has no local variable `loop_var`"
    assert not pfor.member_indices()
