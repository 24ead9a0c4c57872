"""Draws until the time is up or something is wrong: `nox -s fuzz -- --seconds 3600`."""

import argparse
import itertools
import logging
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis

import matrix

matrix.configure()  # before anything runs
from fuzz.strategies import KINDS, SETTINGS  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seconds", type=float, default=3600)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
parser.add_argument("--as-found", action="store_true", help="do not make smaller what is found")
arguments = parser.parse_args()

logging.disable(logging.CRITICAL)  # TensorFlow's, of what cannot be converted
settings = SETTINGS
if arguments.as_found:
    settings = hypothesis.settings(SETTINGS, phases=[hypothesis.Phase.generate])
begin = time.monotonic()
counts = dict.fromkeys(arguments.kinds, 0)
for seed, kind in zip(itertools.count(arguments.seed), itertools.cycle(arguments.kinds)):
    drawn, check = KINDS[kind]
    run = hypothesis.settings(settings, max_examples=50)(hypothesis.given(drawn())(check))
    try:
        hypothesis.seed(seed)(run)()
    except AssertionError as error:
        print(error)
        again = f"--kinds {kind} --seed {seed}"
        sys.exit(f"Wrong, after {time.monotonic() - begin:.0f} s, with {again}.")
    counts[kind] += 50
    if time.monotonic() - begin > arguments.seconds:
        break
print("Nothing wrong in", ", ".join(f"{n} {kind}" for kind, n in counts.items()))
