"""The defects with which the fuzzer is tried can be put back: `python -m fuzz.defects`."""

import ast
import shutil

import pytest

from fuzz.defects import DEFECTS, ROOT


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_can_be_put_back(defect, tmp_path):
    shutil.copytree(ROOT / "sgtrick", tmp_path / "sgtrick")
    defect.put_back(tmp_path / "sgtrick")
    path = tmp_path / "sgtrick" / defect.path
    assert path.read_text() != (ROOT / "sgtrick" / defect.path).read_text()
    ast.parse(path.read_text())
