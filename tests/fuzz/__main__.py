"""Draws until the time is up or something is wrong: `nox -s fuzz -- --seconds 3600`."""

import argparse
import contextlib
import itertools
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from fuzz.apart import Apart
from fuzz.drawing import check_some
from fuzz.strategies import KINDS

EACH = 50  # checks of a seed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seconds", type=float, default=3600)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
parser.add_argument("--limit", type=float, default=120, help="seconds for one draw")
arguments = parser.parse_args()

begin = time.monotonic()
counts = dict.fromkeys(arguments.kinds, 0)
with contextlib.closing(Apart(arguments.limit)) as apart:
    for seed, kind in zip(itertools.count(arguments.seed), itertools.cycle(arguments.kinds)):
        try:
            check_some(KINDS[kind][0](), seed, EACH, apart.checks(kind))
        except AssertionError as error:
            print(error)
            again = f"--kinds {kind} --seed {seed}"
            sys.exit(f"Wrong, after {time.monotonic() - begin:.0f} s, with {again}.")
        counts[kind] += EACH
        if time.monotonic() - begin > arguments.seconds:
            break
print("Nothing wrong in", ", ".join(f"{n} {kind}" for kind, n in counts.items()))
