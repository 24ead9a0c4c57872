"""Records what the cells of an example print, and its figure: of Stan, which the build cannot run.

python docs/record.py stan_program
"""

import contextlib
import io
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "docs" / "recorded"


def main(name: str) -> None:
    script = ROOT / "examples" / f"{name}.py"
    parts = re.split(r"^# %%( \[markdown\])?\n", script.read_text(), flags=re.MULTILINE)
    namespace = {"__name__": "__main__", "__file__": str(script)}
    recorded = []
    for markdown, cell in zip(parts[1::2], parts[2::2], strict=True):
        if not markdown:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(cell, script, "exec"), namespace)
            recorded.append(printed.getvalue().replace(f"{ROOT}/", ""))
    (RECORDED / f"{name}.txt").write_text("# %%\n".join(recorded))
    shutil.copy(ROOT / "examples" / "figures" / f"{name}.png", RECORDED)


if __name__ == "__main__":
    main(sys.argv[1])
