"""Checks in a process of its own: nothing less stops TensorFlow's C++ when it takes too long."""

import logging
import multiprocessing
import resource
from collections.abc import Callable
from typing import Any

import pebble

RESTART = 150  # draws, as TensorFlow keeps some of each
MEMORY = 12 << 30  # bytes


def _begin() -> None:
    import matrix

    matrix.configure()
    logging.disable(logging.CRITICAL)  # TensorFlow's, of what cannot be converted
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _check(kind: str, drawn: Any) -> None:
    from fuzz.strategies import KINDS

    KINDS[kind][1](drawn)


class Apart:
    """A process that checks what is drawn, and is replaced when it is stopped or dies.

    Args:
        limit: Seconds for one draw.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._pool = pebble.ProcessPool(
            max_workers=1,
            max_tasks=RESTART,
            initializer=_begin,
            context=multiprocessing.get_context("spawn"),
        )

    def checks(self, kind: str) -> Callable[[Any], None]:
        """A function that raises what the check raises, and says where there is no verdict."""

        def check(drawn: Any) -> None:
            try:
                self._pool.schedule(_check, args=(kind, drawn), timeout=self._limit).result()
            except TimeoutError:
                print(f"Longer than {self._limit:.0f} s: {drawn}", flush=True)
            except (pebble.ProcessExpired, MemoryError) as error:
                print(f"{error!r}: {drawn}", flush=True)

        return check

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()
