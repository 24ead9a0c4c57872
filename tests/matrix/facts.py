"""What each library does in each cell with the cases of the comparison.

The tables of docs/comparison.md are made of these, and tests/project/test_comparison.py tests them. If
one no longer holds, a rival has changed, by an upgrade of TensorFlow, TFP or Keras; or sgtrick has,
and its tests say so, too.
"""

from collections.abc import Callable

from matrix.cells import CELLS, Cell

DROPPED = [
    "tape around `vectorized_map`",
    "tape around `vectorized_map`, all in `tf.function`",
    "tape around `vectorized_map` in XLA",
    "`ForwardAccumulator` in eager",
    "`ForwardAccumulator` in `tf.function`",
    "`ForwardAccumulator` in XLA",
    "`ForwardAccumulator` around `vectorized_map`",
    "`ForwardAccumulator` around `vectorized_map` of unknown size",
    "nested tapes around `vectorized_map`",
    "reverse over forward",
    "reverse over forward in `tf.function`",
    "forward over forward",
    "forward over forward in `tf.function`",
]
SECOND_OF_TFP_IS_NONE = [  # elsewhere it is zero, or lacks the part with the Hessian
    "nested tapes",
    "nested tapes in `tf.function`",
    "nested tapes in XLA",
    "forward over reverse",
    "forward over reverse in `tf.function`",
    "inner tape inside a `tf.function`, outer around",
    "nested tapes around `vectorized_map`",
    "`vectorized_map` around nested tapes",
]
RAISE_WITHOUT_HESSIAN = [  # TensorFlow has no place for an error in the other cells: NaN
    "nested tapes",
    "nested tapes in `tf.function`",
    "nested tapes over a square",
    "nested tapes over a square in `tf.function`",
    "forward over reverse",
    "forward over reverse in `tf.function`",
    "forward over forward",
    "forward over forward in `tf.function`",
    "`vectorized_map` around nested tapes",
]
ONE_AT_A_TIME = {name for name, cell in CELLS.items() if cell.takes_members}
VALUE_ONLY = {"TFLite, the value"}


def without_hessian(cell: Cell, problem: str) -> str:
    if cell.order == 1:
        return "right"
    return "raises" if cell.name in RAISE_WITHOUT_HESSIAN else "NaN"


def of_tf(cell: Cell, problem: str) -> str:
    if cell.name in DROPPED:
        return "wrong"
    return "raises" if cell.name == "SavedModel without custom gradients" else "right"


def of_tfp(cell: Cell, problem: str) -> str:
    if cell.name == "`tf.gradients` twice in a TF1 graph":
        return "raises"
    if cell.order == 2:
        return "None" if cell.name in SECOND_OF_TFP_IS_NONE else "wrong"
    if problem == "many" and cell.name not in ONE_AT_A_TIME | VALUE_ONLY:
        return "wrong"
    return "right"


FACTS: dict[str, Callable[[Cell, str], str]] = {
    "sgtrick": lambda cell, problem: "right",
    "no hx": without_hessian,
    "tfp": of_tfp,
    "tf": of_tf,
    "keras": of_tf,  # on this backend it is tf.custom_gradient
}
