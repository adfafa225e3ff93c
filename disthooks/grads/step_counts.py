"""Agreement of all ranks about the count of steps, before collectives of different sizes could meet."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from disthooks.errors import AttachError

# [Note: the count of steps is agreed on]
# Which steps are logged, and so how many numbers a step reduces, follows from the count of steps, which is a part of
# the state. Where one rank alone loads a state, the all-reduces of the next step have different sizes on the ranks, and
# gloo ends the process ("792 vs 8 bytes"), or NCCL waits for ever. So the ranks compare their counts in the first step
# after attaching, and in the first step after a load. They compare through the store that they met in, with a few
# messages for each rank: a collective of the same group would meet the one that a rank makes which does not compare.

_attached: dict[tuple[int, ...], itertools.count[int]] = {}
_WARN_AFTER = 30.0  # seconds


class StepCounts:
    """What one attachment's ranks tell each other of their count of steps.

    Args:
        ranks: the global ranks that are attached together, this one among them.
        rank: this one.
        timeout: how many seconds to wait for the others.
    """

    def __init__(self, ranks: Sequence[int], rank: int, timeout: float) -> None:
        self._ranks, self._rank, self._timeout = tuple(ranks), rank, timeout
        # The backend "fake" simulates the other ranks: nobody answers.
        self._is_alone = len(self._ranks) == 1 or dist.get_backend() == "fake"
        self._is_agreed, self._round, self._prefix = self._is_alone, 0, ""
        if not self._is_alone:
            number = next(_attached.setdefault(self._ranks, itertools.count()))
            self._prefix = f"disthooks steps {self._ranks} {number}"

    def loaded(self) -> None:
        """Compare in the next step again, for this rank has loaded a state."""
        self._is_agreed = self._is_alone

    def check(self, steps: int) -> None:
        """Wait until all ranks have said how many steps they count; only in the first step after :meth:`loaded`.

        Raises:
            AttachError: when two ranks count otherwise, or one says nothing in time.
        """
        if self._is_agreed:
            return
        default = dist.distributed_c10d._get_default_store()
        store: Any = dist.distributed_c10d.PrefixStore(f"{self._prefix} {self._round}", default)
        self._round += 1
        said = f"rank {self._rank} counts {steps} steps"
        store.set(f"rank {self._rank}", said)
        first = store.compare_set("first", "", f"{steps}, {said}").decode()
        if first.partition(",")[0] != str(steps):
            store.set("another", said)
        if store.add("there", 1) == len(self._ranks):
            store.set("all", "yes")
        self._wait(store)
        if store.check(["another"]):
            two = f"{first.partition(', ')[2]}, {store.get('another').decode()}"
            raise AttachError(
                f"the ranks {list(self._ranks)} do not go on from the same state ({two}): call load_state_dict() on "
                "every rank, between the same two steps, with what state_dict() gave"
            )
        self._is_agreed = True

    def _wait(self, store: Any) -> None:
        start, pause, warned = time.monotonic(), 0.001, False
        while not store.check(["all"]):
            waited = time.monotonic() - start
            if waited > _WARN_AFTER and not warned:
                warned = True
                warnings.warn(f"{self._waiting(store)}, {waited:.0f} seconds so far", stacklevel=5)
            if waited > self._timeout:
                raise AttachError(f"{self._waiting(store)}, and gave up after {waited:.0f} seconds")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _waiting(self, store: Any) -> str:
        missing = [rank for rank in self._ranks if not store.check([f"rank {rank}"])]
        return (
            f"rank {self._rank} waits in the first step after load_state_dict() or after attaching for the ranks "
            f"{missing}, which have made no such step: each rank has to make the same steps, and to load its state "
            "when the others do"
        )
