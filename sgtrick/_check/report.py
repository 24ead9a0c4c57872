"""The report of `check_gradient`: entries, their table and plot, and the error that carries it."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from sgtrick._types import Args, Array

SEVERITY = ("wrong", "refused", "cannot tell", "kink", "ok")
SHOWN = 20  # entries in a printed table
SLIGHT = 1e-3  # relative errors below it may be the tolerance of a solver
DERIVATIVES = {1: "gradient", 2: "second derivative"}
FACTORS = {  # by which all entries may be wrong, and how that is said
    0.0: "is zero everywhere",
    -1.0: "is right but for its sign, which is reversed",
    2.0: "is twice the numerical one",
    0.5: "is half of the numerical one",
}
NOT_LINEAR = "not linear"
BORDER = "at a border"
ADVICE = {  # for verdicts and remarks
    NOT_LINEAR: (
        "not linear: a rule has to be linear in what it gets, an upstream gradient or a tangent. "
        "Asked with 128 and -64 times the same, it gave answers that are not 128 and -64 times the "
        "same. The table shows the worse one, divided."
    ),
    BORDER: (
        "at a border: at all steps to one side of x or the other, f raises or is not finite, so no "
        "difference can be taken. Move x away from the border of the domain."
    ),
    "refused": (
        "refused: f does not know this derivative and raises or returns NaN; its message is above. "
        "The numerical column shows what the derivative would be."
    ),
    "cannot tell": (
        "cannot tell: the differences are too inaccurate to detect an error of 1 %. Try steps "
        "(max_step) at which f is smooth and above its noise, a larger rtol, or, if f computes in "
        "float32, float64."
    ),
    "kink": (
        "kink: f has different slopes on the two sides of x (left | right), so no derivative. The "
        "embedded one lies between them. Move x to check the gradient on either side."
    ),
}


class Entry(NamedTuple):
    """One derivative, embedded and numerical.

        >>> import sgtrick
        >>> import tensorflow as tf
        >>> print(sgtrick.check_gradient(tf.sin, 1.0).entries[0].verdict)
        ok

    Attributes:
        order: 1 for the gradient, 2 for the derivative of the gradient.
        name: Its name, such as `x[0]['a'][2, 3]`, `y[1] by x[3]` (the derivative of `y[1]` with
            respect to `x[3]`), or `direction 4`.
        embedded: The derivative that the tape returns: 0 for None, NaN if refused.
        numerical: The derivative by finite differences.
        uncertainty: The estimated error of `numerical`.
        allowed: The largest `absolute` that is accepted.
        verdict: `wrong`, `refused`, `cannot tell`, `kink` or `ok`.
        remark: A comment; for `refused`, the message of the refusal; for a `kink`, the slopes.
        steps: The step sizes that were tried, array `[k]`.
        differences: The central differences at these steps, array `[k]`.
    """

    order: int
    name: str
    embedded: float
    numerical: float
    uncertainty: float
    allowed: float
    verdict: str
    remark: str
    steps: Array
    differences: Array

    @property
    def absolute(self) -> float:
        """The absolute difference of `embedded` and `numerical`."""
        return abs(self.embedded - self.numerical)

    @property
    def relative(self) -> float:
        """The difference relative to the larger of the two."""
        larger = np.fmax(abs(self.embedded), abs(self.numerical))
        with np.errstate(invalid="ignore"):  # both may be infinite
            return float(np.divide(self.absolute, larger)) if self.absolute else 0.0

    @property
    def rank(self) -> tuple[int, float]:
        """The sort key of the table: the verdict, then the error relative to the tolerance."""
        with np.errstate(invalid="ignore"):  # both are infinite where `embedded` is
            excess = np.divide(self.absolute, self.allowed) if self.absolute else 0.0
        return SEVERITY.index(self.verdict), -np.nan_to_num(excess, nan=np.inf)


@dataclasses.dataclass(frozen=True)
class GradientReport:
    """The result of `check_gradient`; prints as a table.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> wrong = sgtrick.with_gradient(lambda x: x[0] * x[1], lambda x: x)
        >>> x = tf.constant([2.0, 2.5], tf.float64)
        >>> report = sgtrick.check_gradient(wrong, x, raise_exception=False)
        >>> for entry in report.entries:
        ...     print(f"{entry.name} {entry.embedded:.3f} {entry.numerical:.3f} {entry.verdict}")
        x[0] 2.000 2.500 wrong
        x[1] 2.500 2.000 wrong
        >>> report.passed, report.count("wrong"), report.worst.name
        (False, 2, 'x[0]')

    Attributes:
        entries: The entries, worst first: by verdict, then by error relative to the tolerance.
        evaluations: The number of calls of the function.
        notes: Further remarks about the check.
    """

    entries: tuple[Entry, ...]
    evaluations: int
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every entry is `ok` or a `kink`."""
        return all(entry.verdict in ("ok", "kink") for entry in self.entries)

    def __bool__(self) -> bool:
        """`passed`, so that `assert check_gradient(..., raise_exception=False)` is what it says."""
        return self.passed

    @property
    def worst(self) -> Entry:
        """The worst entry."""
        return self.entries[0]

    def count(self, verdict: str) -> int:
        """The number of entries with this verdict."""
        return sum(entry.verdict == verdict for entry in self.entries)

    def __str__(self) -> str:
        """The table."""
        verdicts = ", ".join(f"{n} {v}" for v in SEVERITY if (n := self.count(v)))
        lines = [f"{len(self.entries)} entries: {verdicts}. {self.evaluations} evaluations."]
        lines[0] += _in_common(self.entries)
        lines += _table(self.entries[:SHOWN])
        if len(self.entries) > SHOWN:
            lines.append(f"... and {len(self.entries) - SHOWN} more with smaller errors")
        lines += dict.fromkeys(e.remark for e in self.entries if e.verdict == "refused")
        lines += self.notes
        said = {e.remark if e.remark in ADVICE else e.verdict for e in self.entries}
        lines += [advice for what, advice in ADVICE.items() if what in said]
        return "\n".join(lines)


class GradientCheckError(AssertionError):
    """A gradient did not pass `check_gradient`.

        >>> import tensorflow as tf
        >>> import sgtrick
        >>> wrong = sgtrick.with_gradient(tf.sin, tf.sin)
        >>> try:
        ...     sgtrick.check_gradient(wrong, tf.constant(0.5))
        ... except sgtrick.GradientCheckError as error:
        ...     print(error.report.worst.verdict)
        wrong

    Attributes:
        report: The `GradientReport`.
    """

    def __init__(self, report: GradientReport) -> None:
        self.report = report
        super().__init__(f"{_headline(report.worst)}\n{report}")

    def __reduce__(self) -> Args:  # by default, pickling would pass the message to __init__
        return type(self), (self.report,)


def _headline(worst: Entry) -> str:
    derivative = DERIVATIVES[worst.order]
    known = {"wrong": "is wrong at", "refused": "is refused at"}
    why = f"embedded {worst.embedded:.8g}, numerical {worst.numerical:.8g}"
    if worst.verdict == "refused":
        why = worst.remark
    elif worst.remark:
        why += f" ({worst.remark})"
    how = known.get(worst.verdict, "could not be checked at")
    return f"The {derivative} {how} {worst.name}: {why}"


def _in_common(entries: tuple[Entry, ...]) -> str:
    """What a person would see in all entries of the worst one's order, if that is wrong."""
    worst = entries[0]
    if worst.verdict != "wrong" or worst.remark:
        return ""
    seen = [e for e in entries if e.order == worst.order and e.verdict in ("wrong", "ok")]
    error = max(e.relative for e in seen if e.verdict == "wrong")
    if error < SLIGHT:
        rtol = f"{10.0 ** math.ceil(math.log10(error)):.0e}"
        return f" All errors are below {rtol}: if that is a solver's tolerance, pass rtol={rtol}."
    embedded, numerical, allowed = np.array([(e.embedded, e.numerical, e.allowed) for e in seen]).T
    if not np.all(np.isfinite(embedded)):
        return ""
    largest = np.argmax(np.abs(numerical))
    ratio = embedded[largest] / numerical[largest] if numerical[largest] else 0.0
    is_shared = len(seen) > 1 and abs(ratio - 1) > 0.01  # by one entry, any number is shared
    for factor in [*FACTORS, ratio] if is_shared else FACTORS:
        if np.all(np.abs(embedded - factor * numerical) <= (1 + abs(factor)) * allowed):
            said = FACTORS.get(factor, f"is {factor:.3g} times the numerical one")
            return f" The {DERIVATIVES[worst.order]} {said}."
    return ""


def _table(entries: tuple[Entry, ...]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("entry", "embedded", "numerical", "+-", "abs. error", "rel. error", "verdict")
    ]
    for e in entries:
        derivatives = (f"{number:.8g}" for number in (e.embedded, e.numerical))
        errors = (f"{number:.1e}" for number in (e.uncertainty, e.absolute, e.relative))
        is_short = e.remark and e.verdict != "refused"
        verdict = f"{e.verdict} ({e.remark})" if is_short else e.verdict
        rows.append((e.name, *derivatives, *errors, verdict))
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *numbers, verdict in rows:
        cells = [n.rjust(width) for n, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells, verdict]))
    return lines
