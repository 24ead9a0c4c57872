"""Draws until the time is up or something is wrong: `nox -s fuzz -- --seconds 3600`."""

import argparse
import contextlib
import itertools
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis

from fuzz.apart import Apart
from fuzz.strategies import KINDS, SETTINGS

EACH = 50  # draws of a seed

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seconds", type=float, default=3600)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
parser.add_argument("--as-found", action="store_true", help="do not make smaller what is found")
parser.add_argument("--limit", type=float, default=120, help="seconds for one draw")
arguments = parser.parse_args()

settings = hypothesis.settings(SETTINGS, max_examples=EACH)
if arguments.as_found:
    settings = hypothesis.settings(settings, phases=[hypothesis.Phase.generate])
begin = time.monotonic()
counts = dict.fromkeys(arguments.kinds, 0)
with contextlib.closing(Apart(arguments.limit)) as apart:
    for seed, kind in zip(itertools.count(arguments.seed), itertools.cycle(arguments.kinds)):
        run = hypothesis.given(KINDS[kind][0]())(apart.checks(kind))
        try:
            hypothesis.seed(seed)(settings(run))()
        except AssertionError as error:
            print(error)
            again = f"--kinds {kind} --seed {seed}"
            sys.exit(f"Wrong, after {time.monotonic() - begin:.0f} s, with {again}.")
        counts[kind] += EACH
        if time.monotonic() - begin > arguments.seconds:
            break
print("Nothing wrong in", ", ".join(f"{n} {kind}" for kind, n in counts.items()))
