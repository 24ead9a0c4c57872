"""The program of docs/long_runs.md: interrupted, and resumed to the last bit."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hanging import HANGS
from pages import ROOT, blocks

PAGE = ROOT / "docs" / "long_runs.md"


def started(folder, name):
    return subprocess.Popen(
        [sys.executable, "long_run.py", name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C interrupts all processes of a terminal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.long
def test_is_interrupted_and_resumed(tmp_path):
    for block in blocks(PAGE, "python"):
        if module := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / module[1]).write_text(block)
    whole, stopped = started(tmp_path, "whole"), started(tmp_path, "stopped")
    while not (tmp_path / "stopped" / "0.npz").exists():
        assert stopped.poll() is None, stopped.communicate()[1]
        time.sleep(0.01)
    os.killpg(stopped.pid, signal.SIGINT)
    printed, errors = stopped.communicate(timeout=HANGS)
    assert stopped.returncode == 1, errors
    assert "stopped: run it again, and it goes on from stopped\n" in errors
    assert printed == ""
    stored = sorted(path.name for path in (tmp_path / "stopped").glob("?.npz"))
    assert "3.npz" not in stored

    printed, errors = started(tmp_path, "stopped").communicate(timeout=HANGS)
    assert re.fullmatch(r"\d+ solvers were given up\n", printed), errors
    printed, errors = whole.communicate(timeout=HANGS)
    assert int(printed.split()[0]) > 0, errors
    assert "RuntimeWarning: on_error replaces the first failure" in errors
    for number in range(4):
        with (
            np.load(tmp_path / "whole" / f"{number}.npz") as a,
            np.load(tmp_path / "stopped" / f"{number}.npz") as b,
        ):
            assert a.files == b.files
            for name in a.files:
                np.testing.assert_array_equal(a[name], b[name])
