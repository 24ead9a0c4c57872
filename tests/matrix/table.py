"""The comparison table of the docs: runs every cell and prints Markdown.

Run it in tests/: python -m matrix.table
"""

import importlib.metadata
import sys
import warnings

import tensorflow as tf

from matrix import CELLS, configure, judge
from matrix.values import comparison_cases

SHORT = {
    "sgtrick": "sgtrick",
    "tfp.math.custom_gradient": "TFP",
    "tf.custom_gradient": "TF",
}
SHOWN = {
    "right": "right",
    "raises": "raises",
    "None": "*no gradient*",
    "wrong": "**wrong**",
}


def main() -> None:
    warnings.simplefilter("ignore")  # the tests have them as errors
    configure()
    tf.get_logger().setLevel("ERROR")
    problems = comparison_cases()
    libraries = list(next(iter(problems.values())))
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("tensorflow", "tensorflow-probability")
    ]
    print(f"Run on {' and '.join(versions)}, Python {sys.version.split()[0]}.")
    group = None
    for cell in CELLS.values():
        if cell.group != group:
            group = cell.group
            print(f"\n## {group[0].upper()}{group[1:]}\n")
            columns = [
                f"{SHORT[library]}, {problem}" for problem in problems for library in libraries
            ]
            print("|", " | ".join(["", *columns]), "|")
            print("|", " | ".join(["---"] * (1 + len(columns))), "|")
        verdicts = [
            SHOWN[judge(cell, problems[problem][library])]
            for problem in problems
            for library in libraries
        ]
        print("|", " | ".join([cell.name, *verdicts]), "|", flush=True)


if __name__ == "__main__":
    main()
