"""Draws programs until the time is up or one of them is wrong: `nox -s fuzz -- --seconds 3600`."""

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
from fuzz.strategies import SETTINGS, check, programs  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seconds", type=float, default=3600)
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()

logging.disable(logging.CRITICAL)  # TensorFlow's, of what cannot be converted
begin = time.monotonic()
for seed in itertools.count(arguments.seed):
    drawn = hypothesis.settings(SETTINGS, max_examples=50)(hypothesis.given(programs())(check))
    try:
        hypothesis.seed(seed)(drawn)()
    except AssertionError as error:
        print(error)
        sys.exit(f"Wrong, after {time.monotonic() - begin:.0f} s, with seed {seed}.")
    if time.monotonic() - begin > arguments.seconds:
        break
print(f"Nothing wrong in {(seed + 1 - arguments.seed) * 50} programs.")
