"""The transformation matrix: every way in which TensorFlow differentiates, maps or stores a function.

A `Case` supplies a true function and the form under test; a `Cell` runs one function under one
transformation. `Problem.expected` says what should come out, from the true function alone, by one
eager tape per member. `verdict` compares the two, for all tests and for the table in the docs.
"""

from matrix.cells import CELLS, Cell, judge, promised
from matrix.pairs import pairs, spread
from matrix.problem import LOUD, Case, Problem, compare, configure, traced, verdict

__all__ = [
    "CELLS",
    "LOUD",
    "Case",
    "Cell",
    "Problem",
    "compare",
    "configure",
    "judge",
    "pairs",
    "promised",
    "spread",
    "traced",
    "verdict",
]
