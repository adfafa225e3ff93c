"""The cheapest mixture of moving and computing again, against all mixtures; and ``fit``'s choice on modelled steps."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from disthooks.saved.checkpointed_layers import LAYER, CheckpointedLayers
from disthooks.saved.computed_again import ComputedAgain
from disthooks.saved.cost import Kind, Rates, cheapest, seconds_of
from disthooks.saved.stopwatch import Stopwatch

GB = 1 << 30


@pytest.mark.parametrize("seed", range(50))
def test_no_mixture_of_whole_groups_is_cheaper(seed: int) -> None:
    """All choices of seven groups and four layers are tried."""
    dice = random.Random(seed)
    groups = [Kind(str(i), dice.uniform(1, 9), dice.uniform(0, 9)) for i in range(7)]
    layers = Kind("layers", 40.0, dice.uniform(0, 40), 10.0)
    forward, backward, tensor = dice.uniform(0, 20), dice.uniform(0, 20), dice.uniform(0, 9)
    out, back = dice.uniform(0, 2), dice.uniform(0, 2)
    disk = Rates(forward, backward, 3 * out, 3 * back, tensor=tensor)
    rates = Rates(forward, backward, out, back, tensor, dice.uniform(0, 60), disk if seed % 2 else None)
    kinds = [*groups, layers]
    excess = dice.uniform(0, 1.2) * sum(kind.nbytes for kind in kinds)
    found = cheapest(kinds, excess, rates)
    assert found.seconds == pytest.approx(seconds_of(kinds, found.again, excess, rates))
    assert found.again["layers"] * 4 == round(found.again["layers"] * 4), "a layer is computed again as a whole"
    for *chosen, count in itertools.product(*[(0.0, 1.0)] * 7, range(5)):
        again = {kind.name: part for kind, part in zip(groups, chosen, strict=True)} | {"layers": count / 4}
        assert found.seconds <= seconds_of(kinds, again, excess, rates) + 1e-9


class Step:
    """Steps of a model of twelve layers in checkpoints, whose seconds are those of ``truth`` and not of a clock.

    Each layer saves 1 GB and takes 0.1 s; without checkpoints the step saves 2 GB more, of which ``Recompute`` can drop
    1 GB in ``drop`` seconds.
    """

    def __init__(self, rates: Rates, truth: Rates, drop: float = 0.01, droppable: int = GB) -> None:
        self.rates, self.truth, self.drop, self.droppable = rates, truth, drop, droppable
        self.watch = Stopwatch(torch.device("cpu"))
        self.watch.add(LAYER, 1, 0.0, 0.1)
        self.watch.add("relu", GB, 0.0, drop)
        self.watch.read()
        self.again = ComputedAgain(self.watch)
        model = nn.Sequential(*(checkpoint_wrapper(nn.Linear(1, 1)) for _ in range(12)))
        self.again.layers = CheckpointedLayers(model, [""])
        self.model = model
        model(torch.ones(1))

    def make(self, limit: int) -> float:
        """One step; its seconds."""
        again = self.again
        self.is_new = again.choose(8, limit, self.rates)
        dropped = self.droppable
        if again.droppable.left is not None:
            dropped = int(min(dropped, again.droppable.left.get("relu", 0)))
        if dropped:
            again.droppable.take("relu", dropped)
        saved = 2 * GB - dropped + again.off * GB
        seconds = 2.0 + (12 - again.off) * 0.1 + self.drop * dropped / GB + self.truth.moving(saved - limit)
        again.learn(8, saved, 2 * GB, max(0, saved - limit), seconds)
        return seconds


FAST = Rates(1.0, 2.0, out=1 / (25 * GB), back=1 / (25 * GB))
SLOW = Rates(1.0, 2.0, out=1 / GB, back=1 / GB)


@pytest.mark.parametrize(("rates", "off"), [(FAST, 12), (SLOW, 6)], ids=["fast link", "slow disk"])
def test_checkpoints_are_off_as_far_as_the_link_pays_for_it(rates: Rates, off: int) -> None:
    """Six layers fit under the limit. The fast link moves the other six beside the computation."""
    step = Step(rates, rates)
    seconds = [step.make(7 * GB + (1 << 20)) for _ in range(20)]
    by_bytes = seconds[3]
    assert step.again.off >= off
    assert seconds[-1] <= by_bytes + 1e-9, "never slower than by bytes alone"
    if rates is FAST:
        assert step.again.off == off
        assert seconds[-1] == pytest.approx(2.0)
        assert step.again.outlook is not None
    assert seconds[-1] == min(seconds), "the choice has settled, on the best step of all"


def test_seconds_choose_although_the_limit_differs_a_little_from_step_to_step() -> None:
    """As on a CPU, whose resident memory is never the same twice."""
    step = Step(FAST, FAST, droppable=0)
    for i in range(20):
        step.make(7 * GB + i % 2 * GB // 3)
    assert step.again.off == 12


def test_a_mixture_that_is_slower_than_the_one_before_is_given_up_for_good() -> None:
    """What was measured of the link says that moving costs nothing, and the steps say otherwise."""
    step = Step(FAST, Rates(0.0, 0.0, out=0.2 / GB, back=0.2 / GB))
    seconds, new = [], []
    for i in range(30):
        seconds.append(step.make(7 * GB + (1 << 20)))
        new += [i] if step.is_new else []
    assert max(seconds[5:15]) > seconds[4], "it was tried"
    assert seconds[-10:] == [pytest.approx(min(seconds[3:5]))] * 10
    assert len(new) == 2, "fit is told of the change by seconds, and of the way back"
    assert step.again.outlook is None, "what was measured has proven wrong"


@pytest.mark.parametrize(("rates", "part"), [(SLOW, 0.5), (FAST, 0.0)], ids=["slow disk", "fast link"])
def test_no_more_is_dropped_than_is_cheaper_than_moving_it(rates: Rates, part: float) -> None:
    """1.5 of 2 GB do not fit. The disk writes 1 GB beside forward; what it had to write beyond that is dropped."""
    step = Step(rates, rates, drop=0.2)
    step.again.layers = CheckpointedLayers(None, ())
    for _ in range(20):
        step.make(GB // 2)
    assert step.again.nbytes == pytest.approx(part * GB)


def test_a_round_that_goes_on_may_drop_what_is_left_of_its_share() -> None:
    """Two forwards wait for one backward. What the first one has dropped counts, and a share of both is not all."""
    again = ComputedAgain()
    again.choose(8, 0)
    again.droppable.take("relu", 40)
    again.learn(8, saved=50, needed=30)
    again.choose(8, 80)
    assert again.droppable.left == {"relu": 11.5}
    again.droppable.take("relu", 5)
    again.choose(8, 80, is_going_on=True)
    assert again.droppable.left == {"relu": 6.5}
    again.droppable.take("relu", 7)
    again.choose(8, 80, is_going_on=True)
    assert again.droppable.left == {}
    again.choose(8, 0)
    again.droppable.take("relu", 40)
    again.choose(8, 80, is_going_on=True)
    assert again.droppable.left == {}
    again.learn(8, saved=50, needed=30)
    again.choose(8, 80)
    assert again.droppable.left == {"relu": 11.5}, "as many bytes can be dropped as before"


def test_a_mixture_that_saves_less_than_two_percent_of_a_step_changes_nothing() -> None:
    step, found = Step(FAST, FAST, drop=0.02), []
    step.again.layers = CheckpointedLayers(None, ())
    for _ in range(20):
        step.make(GB // 2)
        found.append((step.is_new, step.again.nbytes))
    assert set(found) == {(False, GB)}
