"""Functions that run at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from disthooks._torch import top_hooks


def together(functions: Sequence[Callable[[], object]], limit: float = 60) -> list[Any]:
    """The result of each function in a thread of its own, or the exception that it raised.

    All start at the same moment. No thread hangs, and none leaves hooks.
    """
    results: list[Any] = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(i: int) -> None:
        start.wait(limit)
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error
        if top_hooks(True) is not None:
            results[i] = AssertionError("hooks were left in the thread")

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results
