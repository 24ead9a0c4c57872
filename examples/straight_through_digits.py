# %% [markdown]
# # A layer of bits, trained by the straight-through estimator
#
# A network with a layer of 32 bits between the pixels of a handwritten digit and its class. The
# step function that computes the bits has derivative zero, so no gradient would reach the weights
# in front of it. The straight-through estimator passes the gradient on where the input is within
# [-1, 1]. In Keras it is a layer of one line, which is stored and loaded like any other, with its
# gradient. The same script runs on TensorFlow, JAX and PyTorch: `KERAS_BACKEND=jax python
# straight_through_digits.py`.

# %%
"""A binary layer trained by the straight-through estimator, stored and reloaded."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from tqdm import tqdm

BEGIN = time.perf_counter()


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
    import keras
    from keras import ops

    import sgtrick.keras

# A notebook has no file.
HERE = Path(__file__).parent if "__file__" in globals() else Path()
BITS, EPOCHS, SEED = 32, 40, 1

# %% [markdown]
# ## Data: the 1797 digits of scikit-learn, 8 by 8 pixels

# %%
digits = load_digits()
order = np.random.default_rng(SEED).permutation(len(digits.target))
images = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order]
train, test = slice(0, 1400), slice(1400, None)

# %% [markdown]
# ## The layer, and the same without a gradient


# %%
@sgtrick.keras.custom_vjp
def straight_through(x: Any) -> Any:
    """Steps to -1 or 1, with the gradient of a ramp."""
    return ops.where(x > 0, 1.0, -1.0), lambda u: ops.where(ops.abs(x) <= 1, u, 0.0)


@keras.saving.register_keras_serializable("digits")
class Bits(keras.layers.Layer):
    """A bit for each number."""

    def call(self, x: Any) -> Any:  # noqa: D102
        return straight_through(x)


class StoppedBits(keras.layers.Layer):
    """The step as autodiff sees it: nothing reaches what is before it."""

    def call(self, x: Any) -> Any:  # noqa: D102
        return ops.where(x > 0, 1.0, -1.0) + 0 * x


def network(bits: keras.layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(SEED)
    return keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(BITS), bits, keras.layers.Dense(10)]
    )


# %% [markdown]
# ## Training


# %%
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(model: keras.Model, bar: tqdm) -> list[float]:
    """Returns the accuracy on the test images after each epoch."""
    model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    history = model.fit(
        images[train],
        labels[train],
        batch_size=100,
        epochs=EPOCHS,
        validation_data=(images[test], labels[test]),
        callbacks=[
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: bar.update())
        ],
        verbose=0,
    )
    return history.history["val_accuracy"]


models = {"straight-through": network(Bits()), "no gradient": network(StoppedBits())}
print(f"{len(models)} networks on {keras.backend.backend()}, {EPOCHS} epochs each")
# disable=None: no bar without a terminal.
with tqdm(total=EPOCHS * len(models), disable=None) as bar:
    accuracies = {name: fit(model, bar) for name, model in models.items()}
for name, accuracy in accuracies.items():
    print(
        f"{name:17} {100 * accuracy[-1]:.1f} % of {len(labels[test])} test images right"
    )

# %% [markdown]
# ## Stored, reloaded, and checked against NumPy
#
# The gradient of the loss with respect to the first layer's weights comes from the stored model,
# from the reloaded model and from the chain rule in NumPy. One step of gradient descent tells what
# the gradient of a model is, on every backend.


# %%
def by_descent(model: keras.Model, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    rate, weights = 100.0, model.get_weights()
    model.compile(keras.optimizers.SGD(rate), LOSS)
    model.train_on_batch(x, y)
    moved = weights[0] - model.get_weights()[0]
    model.set_weights(weights)
    return moved / rate


def by_chain_rule(model: keras.Model, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    w, b, v, c = (weights.astype(np.float64) for weights in model.get_weights())
    before = x @ w + b
    logits = np.where(before > 0, 1, -1) @ v + c
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    by_logits = (p - np.eye(10)[y]) / len(y)
    return x.T @ (by_logits @ v.T * (np.abs(before) <= 1))


model = models["straight-through"]
with tempfile.TemporaryDirectory() as folder:
    model.save(Path(folder) / "bits.keras")
    reloaded = keras.models.load_model(Path(folder) / "bits.keras")
some = images[test], labels[test]
stored, loaded, expected = (
    by_descent(model, *some),
    by_descent(reloaded, *some),
    by_chain_rule(model, *some),
)
scale = np.abs(expected).max()
print(f"\nlargest gradient with respect to the first weights {scale:.4f}")
print(f"  off by {np.abs(stored - expected).max():.1e} in the model that was stored")
print(f"  off by {np.abs(loaded - expected).max():.1e} in the model that was reloaded")

# %% [markdown]
# ## Figure: accuracy, and the bits of some digits

# %%
FIGURES = HERE / "figures"
FIGURES.mkdir(exist_ok=True)
BLUE, ORANGE = "#0072B2", "#E69F00"  # distinct to colour-blind eyes
spines = {"axes.spines.top": False, "axes.spines.right": False}
plt.rcParams.update({"font.size": 11, **spines})

figure = plt.figure(figsize=(11, 4.8), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1, 1.15])
axis = left.subplots()
for (name, accuracy), color in zip(accuracies.items(), [BLUE, ORANGE], strict=True):
    axis.plot(
        np.arange(1, EPOCHS + 1), 100 * np.array(accuracy), color=color, label=name
    )
axis.set(xlabel="epoch", ylabel="test images right (%)", xlim=(0, EPOCHS))
axis.legend(frameon=False, loc="lower right")
axis.set_title(f"{BITS} bits between pixels and class", fontsize=11)

codes = keras.Sequential(reloaded.layers[:2]).predict(images[test], verbose=0)
right.suptitle("three images of each digit, and their bits", fontsize=11)
panels = right.subplots(4, 5)
for digit in range(10):
    rows = np.flatnonzero(labels[test] == digit)[:3]
    row, column = 2 * (digit // 5), digit % 5
    picture, bits = panels[row, column], panels[row + 1, column]
    picture.imshow(
        np.hstack([images[test][i].reshape(8, 8) for i in rows]), cmap="gray_r"
    )
    bits.imshow(codes[rows], cmap="gray_r", aspect="auto", interpolation="nearest")
for panel in panels.flat:
    panel.set(xticks=[], yticks=[])
figure.savefig(FIGURES / "straight_through_digits.png", dpi=150)
print(f"\nFigure: {FIGURES / 'straight_through_digits.png'}")

# %% [markdown]
# ## Verdict

# %%
print(f"{time.perf_counter() - BEGIN:.0f} s")
last = {name: accuracy[-1] for name, accuracy in accuracies.items()}
checks = {
    "the stored model's gradient is that of NumPy": np.allclose(
        stored, expected, atol=1e-4 * scale
    ),
    "the reloaded model's gradient is that of the stored one": np.allclose(
        loaded, stored, atol=1e-5 * scale
    ),
    "more than 93 % are right": last["straight-through"] > 0.93,
    "training the bits helps": last["straight-through"] > last["no gradient"] + 0.02,
}
failed = [what for what, holds in checks.items() if not holds]
if failed:
    sys.exit("This should hold, and does not:\n  " + "\n  ".join(failed))
print("The gradient is the expected one, before and after, and it trains the bits.")
