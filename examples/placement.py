# %% [markdown]
# # Where everything runs
#
# Places the forward and backward operations of three functions on another device, and shows what
# is copied between the devices. Without a GPU, a second logical CPU takes its place.
#
# The backward operations of `with_gradient` and `from_numpy` run where the value is, whatever scope
# `tape.gradient` is called in. The backward operations of a formula run in the scope in which
# `tape.gradient` is called. That is why the second half of the output has fewer copies for the
# formula.

# %%
"""Where the ops of a log density run, forward and backward, and what is copied between devices."""

import contextlib
import os
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Newer TensorFlow prints to file descriptor 2 before it reads its own log level."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with silent_stderr():
    import numpy as np
    import tensorflow as tf

    # Run metadata of functions has no public name.
    from tensorflow.python.eager import context

    import sgtrick

    # Without a GPU, a second logical CPU takes its place.
    CPU = tf.config.list_physical_devices("CPU")[0]
    TWO = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(CPU, TWO)
    DEVICE = "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:1"


def engine(x: Any) -> tuple[Any, Any]:
    return -0.5 * np.sum(x**2, -1), -x


def value(x: Any) -> Any:
    return -0.5 * tf.reduce_sum(x**2, -1)


def on_device(h: Any) -> Any:
    """A form in a scope, which ends before the gradient is asked for."""

    def placed(x: Any) -> Any:
        with tf.device(DEVICE):
            return h(x)

    return placed


# %%
FORMS = {
    "with_gradient": sgtrick.with_gradient(value, tf.negative, device=DEVICE),
    "reverse_gradient, a formula": on_device(
        lambda x: sgtrick.reverse_gradient(value(x))
    ),
    "from_numpy": on_device(sgtrick.from_numpy(engine, vectorized=True)),
}


def with_gradient(h: Any, x: Any, device: str | None) -> Any:
    """`y` and the gradient of `y**2 / 2`, which is asked for in a scope of its own."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        with tf.name_scope("forward"):
            y = h(x)
    with tf.name_scope("backward"), tf.device(device):
        return y, tape.gradient(y, x, y)


def nodes(function: Any, x: Any) -> list[Any]:
    """The nodes that TensorFlow ran for a function, by device, with the copies."""
    concrete = tf.function(function).get_concrete_function(x)
    context.context().enable_run_metadata()
    context.context().export_run_metadata()  # what ran before: TensorFlow collects
    concrete(x)
    metadata = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    return [
        n for f in metadata.function_graphs for g in f.partition_graphs for n in g.node
    ]


def short(device: Any) -> str:
    """`CPU:1`."""
    return str(device).split("device:")[-1]


def where(ops: list[Any]) -> str:
    counts = Counter(short(op.device) for op in ops)
    return ", ".join(f"{n} on {device}" for device, n in sorted(counts.items()))


def copies(ops: list[Any]) -> str:
    ends = ("send_device", "recv_device")
    counts = Counter(
        " to ".join(short(op.attr[end].s.decode()) for end in ends)
        for op in ops
        if op.op == "_Send"
    )
    return ", ".join(f"{n} {way}" for way, n in sorted(counts.items())) or "none"


def by_phase(h: Any, x: Any, scope: str | None) -> tuple[dict[str, list[Any]], str]:
    """What ran forward, backward and in the engine, and what was copied."""
    ran = nodes(lambda x: with_gradient(h, x, scope), x)
    engines = [n for n in ran if "PyFunc" in n.op]
    ops = [
        n for n in ran if n not in engines and n.op not in ("Const", "_Send", "_Recv")
    ]
    # TensorFlow's own derivative of an op is named gradient_tape/ and the op.
    names = {"forward": "forward/", "backward": ("backward/", "gradient_tape/")}
    phases = {
        phase: [n for n in ops if n.name.startswith(prefix)]
        for phase, prefix in names.items()
    }
    return phases | ({"engine": engines} if engines else {}), copies(ran)


# %%
X = tf.random.stateless_normal([4, 3], seed=[1, 2])
Y = FORMS["with_gradient"](X)
print(f"x is on {short(X.device)}. The forms are placed on {DEVICE}.")
print(f"The value of with_gradient is on {short(Y.device)}.")
COUNTED = {}
for scope in (None, DEVICE):
    where_asked = f"under tf.device({scope!r})" if scope else "outside all scopes"
    print(f"\nIn a tf.function, with tape.gradient called {where_asked}:")
    for name, h in FORMS.items():
        phases, copied = by_phase(h, X, scope)
        print(f"  {name}")
        for phase, ops in phases.items():
            COUNTED[scope, name, phase] = Counter(short(op.device) for op in ops)
            print(f"    {phase:9} {where(ops)}")
        print(f"    copies    {copied}")
try:
    sgtrick.with_gradient(value, tf.negative, device="TPU:0")(X)
except ValueError as error:
    print(f"\n{textwrap.fill(str(error), 88)}")

# %% [markdown]
# ## Figure: where the operations run

# %%
# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
COLORS = {"CPU:0": "0.7", DEVICE: "#0072B2"}
spines = {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams.update({"font.size": 11, **spines})
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
rows = {key[1:]: counts for key, counts in COUNTED.items() if key[0] is None}
left = [0] * len(rows)
for device, color in COLORS.items():
    counts = [count[device] for count in rows.values()]
    axis.barh(range(len(rows)), counts, left=left, color=color, label=f"on {device}")
    left = [a + b for a, b in zip(left, counts, strict=True)]
labels = [f"{name.partition(',')[0]}, {phase}" for name, phase in rows]
axis.set_yticks(range(len(rows)), labels)
axis.invert_yaxis()
axis.set(xlabel="operations, with tape.gradient called outside all scopes")
axis.legend(frameon=False)
figure.savefig(FIGURES / "placement.png", dpi=150)
print(f"\nFigure: {FIGURES / 'placement.png'}")
