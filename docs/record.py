"""Records what an example prints and draws that the build of the docs cannot run, as Stan's.

python docs/record.py stan_program
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "docs" / "recorded"


def main(name: str) -> None:
    script = ROOT / "examples" / f"{name}.py"
    printed = subprocess.run(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    (RECORDED / f"{name}.txt").write_text(printed.replace(f"{ROOT}/", ""))
    shutil.copy(ROOT / "examples" / "figures" / f"{name}.png", RECORDED)


if __name__ == "__main__":
    main(sys.argv[1])
