"""How often `check_gradient` is wrong, measured."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class TestRates:
    @pytest.mark.long
    def test_small_run(self):
        rates = runpy.run_path(str(ROOT / "tests" / "benchmarks" / "check_gradient_rates.py"))[
            "rates"
        ]
        kinds = [
            "entries of 1e-4 to 1e4",
            "fast beside `x`",
            "float32, saturated",
            "float32 and an offset, as float64",
        ]
        counts = rates(1, kinds, ["full"])
        for (kind, _, right), counter in counts.items():
            assert not counter["wrong" if right else "passed"], kind
        assert {kind for kind, *_ in counts} == set(kinds)

    def test_the_docs_table_is_of_200_functions(self):
        text = (ROOT / "docs" / "check_gradient_rates.inc").read_text()
        assert int(re.match(r"(\d+) random functions", text)[1]) >= 200
        alarm, missed = map(
            float, re.search(r"\| all \| ([\d.]+)&nbsp;/&nbsp;([\d.]+) \|", text).groups()
        )
        assert alarm == 0
        assert missed == 0
        undecided = re.search(r"`cannot tell` for ([\d.]+) % .* and ([\d.]+) % of the wrong", text)
        assert max(map(float, undecided.groups())) < 9
