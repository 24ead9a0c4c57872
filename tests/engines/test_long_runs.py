"""The program of docs/long_runs.md: resumed to the last bit, and interrupted."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hanging import HANGS
from pages import ROOT, blocks

PAGE = ROOT / "docs" / "long_runs.md"
SIZES = {"4, 4, 10, 3\n": "3, 3, 6, 3\n", "SECONDS = 4 ": "SECONDS = 2 "}  # enough for a test
ENDLESS = "3, 1_000_000, 6, 3\n"  # not done before it is interrupted, however slow the test


def written(folder, sizes):
    """The folder, with the page's programs of these sizes in it."""
    folder.mkdir()
    for block in blocks(PAGE, "python"):
        if module := re.match(r"# (\w+\.py)\n", block):
            for size, smaller in sizes.items() if module[1] == "sampler.py" else ():
                assert size in block
                block = block.replace(size, smaller)
            (folder / module[1]).write_text(block)
    return folder


def started(folder):
    return subprocess.Popen(
        [sys.executable, "long_run.py", "draws"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C interrupts all processes of a terminal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def waits_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


@pytest.mark.long
def test_is_interrupted_and_resumed(tmp_path):
    whole = written(tmp_path / "whole", SIZES)
    resumed = written(tmp_path / "resumed", {**SIZES, "4, 4, 10, 3\n": ENDLESS})
    running = started(whole)
    waits_for(whole / "draws" / "0.npz", running)
    (resumed / "draws").mkdir()
    shutil.copy(whole / "draws" / "0.npz", resumed / "draws")
    stopped = started(resumed)
    waits_for(resumed / "draws" / "1.npz", stopped)
    os.killpg(stopped.pid, signal.SIGINT)
    printed, errors = stopped.communicate(timeout=HANGS)
    assert stopped.returncode == 1, errors
    assert "stopped: run it again, and it goes on from draws\n" in errors
    assert printed == ""

    printed, errors = running.communicate(timeout=HANGS)
    assert re.fullmatch(r"[1-9]\d* solvers were given up\n", printed), errors
    assert "RuntimeWarning: on_error replaces the first failure" in errors
    assert (whole / "draws" / "2.npz").exists()
    with np.load(whole / "draws" / "1.npz") as a, np.load(resumed / "draws" / "1.npz") as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name])
