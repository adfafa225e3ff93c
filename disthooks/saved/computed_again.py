"""``ComputedAgain`` decides what a model under ``fit`` computes again: checkpointed layers, and what is dropped."""

# [Note: no more is computed again than has to be]
# If nothing had to move, the room that is left under the limit of saved tensors is for checkpointed layers: as many as
# fit into it, from the last one on, run without their checkpoint; see [Note: checkpoints that are switched off]. The
# first of them are counted with all that the step needs beside saved tensors, since a layer that is computed again lies
# in memory as a whole. Then their bytes are known. When no checkpoint is on, the rest of the room is for what Recompute
# can drop: it drops only as much as does not fit, first what is saved first. That comes second, because Recompute runs
# cheap operators, and a checkpoint runs products of matrices.
#
# All of these tensors are under the limit, as any other saved tensor. So a wrong count moves tensors, and no budget is
# passed. Where checkpoints that were off made tensors move, inputs of that size never have as many off again.

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from disthooks.saved.checkpointed_layers import CheckpointedLayers
from disthooks.saved.pipeline import Droppable

# The part of the room that is filled with what Recompute could drop. A number of bytes that is too large by a part of
# the limit stays, because another number changes the plan of the store, which costs a step.
_FILLED, _STAYS = 0.95, 0.025


@dataclass
class _Size:
    """What is known of rounds of inputs of one size.

    Attributes:
        saved: bytes of saved tensors, other than weights, with every checkpoint on and all dropped that can be.
        layer: bytes that each checkpoint that is off adds; too many as long as none was off.
        most: how many may be off, as far as is known.
        is_measured: whether ``layer`` is known from a round with checkpoints off.
        dropped: bytes that Recompute dropped in the last round in which it dropped all that it could.
        droppable: bytes that it may drop; None for all.
    """

    saved: int
    layer: int
    most: int
    is_measured: bool = False
    dropped: int = 0
    droppable: int | None = None


class ComputedAgain:
    """What a model computes again in each round, from one forward with gradients on to the next.

    Attributes:
        droppable: how much Recompute may drop.
        layers: those whose checkpoints can be switched off.
        off: how many of their checkpoints are off in the round that is under way, from the last layer on.
        nbytes: bytes that the last round has computed again, as far as is known.

    >>> again = ComputedAgain()
    >>> again.choose(size=8, limit=100)
    >>> again.learn(size=8, saved=50, dropped=40, needed=30, missing=0), again.nbytes
    (0, 40)
    >>> again.choose(size=8, limit=80)  # there is room for 30 of the 40 bytes, and 95% of it is used
    >>> again.droppable.nbytes
    11
    """

    def __init__(self) -> None:
        self.droppable, self.layers, self.nbytes = Droppable(), CheckpointedLayers(None, ()), 0
        self.off = 0
        self._allowed: int | None = None  # what Recompute might drop when the round began
        self._sizes: dict[int, _Size] = {}

    def state_dict(self) -> dict[int, Any]:
        return {size: astuple(each) for size, each in self._sizes.items()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        self._sizes = {size: _Size(*each) for size, each in state.items()}

    def choose(self, size: int, limit: int) -> None:
        """Decide for a round of inputs of ``size`` with so many bytes of saved tensors, and switch Recompute."""
        self.off, self._allowed = self._choice(size, limit)
        self.droppable.nbytes = self._allowed

    def _choice(self, size: int, limit: int) -> tuple[int, int | None]:
        """How many checkpoints may be off, and how many bytes Recompute may drop."""
        if not self._sizes:
            return 0, None
        like, growth = nearest_size(size, self._sizes)
        known, count = self._sizes[like], len(self.layers)
        room = limit - known.saved * growth
        if room <= 0:
            return 0, None
        least = 0 if known.is_measured else 1
        off = min(count, max(least, min(known.most, int(room / (known.layer * growth)))))
        if off < count:
            return off, None
        wanted = max(0, int(known.dropped * growth - _FILLED * max(0, room - off * known.layer * growth)))
        if like == size and known.droppable is not None and wanted <= known.droppable <= wanted + _STAYS * limit:
            return off, known.droppable
        return off, wanted

    def learn(self, size: int, saved: int, dropped: int, needed: int, missing: int) -> int:
        """Note what a round of inputs of ``size`` has shown.

        Returns:
            Bytes that another round of the size may need beside those. A layer that is computed again lies in memory as
            a whole. In a round with checkpoints off that may not be seen, because the layers that are not computed
            again were freed before.
        """
        self.nbytes, off = dropped, self.off
        known = self._sizes.get(size)
        if known is None and off:  # as many were off as the next known size allowed; both grow alike
            like = self._sizes[nearest_size(size, self._sizes)[0]]
            known = replace(like, saved=int(saved * like.saved / (like.saved + off * like.layer)), is_measured=False)
        elif known is None and missing:
            return 0
        elif known is None:
            known = _Size(saved, max(1, needed), len(self.layers), dropped=dropped)
        self._sizes[size] = known
        known.droppable = self._allowed
        if self._allowed is None:
            known.dropped = dropped
        saved -= max(0, known.dropped - dropped)  # what it could have dropped, and did not
        if off:
            if missing and self._allowed is None and known.is_measured:
                known.most = off - 1
            # A model that uses its layers in turn adds other bytes in each round: the most count.
            known.layer = max(1, (saved - known.saved) // off, known.layer if known.is_measured else 0)
            known.is_measured = True
        else:
            known.saved = saved
        if known.is_measured:
            self.nbytes += known.layer * (len(self.layers) - off)
        return known.layer if off else 0


def nearest_size(size: int, known: Collection[int]) -> tuple[int, float]:
    """The size of ``known`` that tells most about ``size``, and how much more ``size`` may need.

    This is the next larger one, or the largest. From that one bytes may grow by the square of the ratio, since
    attention without a fused kernel does.

    >>> nearest_size(3, [2, 4, 8]), nearest_size(16, [2, 4, 8])
    ((4, 1.0), (8, 4.0))
    """
    like = min((each for each in known if each >= size), default=max(known))
    return like, max(1.0, size / like) ** 2
