"""A bar of the calls of an engine, shown while a compiled sampler runs."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

# Seconds between two looks at the counters.
_INTERVAL = 0.1


@contextlib.contextmanager
def progress(
    counters: Callable[[], tuple[int, int]], total: int | None, desc: str
) -> Iterator[None]:
    """A scope that shows how many calls are made in it, if there is a terminal or notebook.

    Args:
        counters: Returns the numbers of calls and of failures so far.
        total: How many calls are expected, if that is known.
        desc: What stands before the bar.
    """
    try:
        from tqdm import auto, notebook
    except ImportError as error:
        raise ImportError(
            f"progress needs tqdm, which is not installed for {sys.executable}. Install the extra "
            f"sgtrick[progress], or the package alone: {sys.executable} -m pip install tqdm",
            name="tqdm",
        ) from error
    # None asks whether there is a terminal, of which a notebook has none.
    disable = False if issubclass(auto.tqdm, notebook.tqdm) else None
    calls_before, failures_before = counters()
    with auto.tqdm(total=total, desc=desc, unit="call", disable=disable) as bar:

        def show() -> None:
            calls, failures = counters()
            if failures > failures_before:
                bar.set_postfix(failures=failures - failures_before, refresh=False)
            bar.update(calls - calls_before - bar.n)

        def keep_showing() -> None:
            while not ended.wait(_INTERVAL):
                show()

        # The sampler may hold the main thread for hours, but not Python's lock.
        ended = threading.Event()
        thread = threading.Thread(target=keep_showing, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            show()
