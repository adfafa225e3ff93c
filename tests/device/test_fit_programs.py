"""``fit`` where a step is more than one forward and its backward: no step of these programs is over the budget."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import softplus

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.saved.fit import Fitted
from tests.device.test_fit import Decoder
from tests.support.sim import simulated
from tests.support.stores.inside import device_bytes

STEPS = 6
MOVED, RECOMPUTED = (dh.OnCpu(),), (dh.Recompute(), dh.OnCpu())


class Training:
    """A model that is trained, and a second one: a reference of its first weights, or what judges it.

    Attributes:
        peaks: the most bytes that the device had in use in each step, whoever resets the device's own figure.
    """

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        torch.manual_seed(0)
        self.model, self.other = Decoder(8).to(device), Decoder(8).to(device)
        self.optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (self.model, self.other)]
        self.inputs = torch.randn(8, 64, 8, generator=torch.Generator().manual_seed(1)).to(device)
        self.lengths, self.peaks = random.Random(0), [0]

    def update(self, loss: torch.Tensor, which: int = 0) -> None:
        self.optimizers[which].zero_grad()
        loss.backward()
        self.optimizers[which].step()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for model in (self.model, self.other) for parameter in model.parameters()]


def accumulated(run: Training) -> None:
    """Four batches, and then one step of the optimizer. The first backward makes the gradients."""
    run.optimizers[0].zero_grad()
    for i in range(4):
        run.model(run.inputs + i).square().mean().backward()
    run.optimizers[0].step()


def preferred(run: Training) -> None:
    """Two answers of random lengths, one better than the other, beside those of a frozen reference (DPO)."""
    good, bad = (run.inputs[:, : run.lengths.randrange(24, 65)] for _ in range(2))
    with torch.no_grad():
        reference = run.other(good).mean() - run.other(bad).mean()
    better = run.model(good).mean()
    run.update(softplus(better - run.model(bad).mean() - reference))


def with_itself_as_reference(run: Training) -> None:
    """The same, and the reference is the model, without gradients, between the two answers."""
    good, bad = run.inputs, run.inputs[:, :40]
    better = run.model(good).mean()
    with torch.no_grad():
        reference = run.model(good).mean() - run.model(bad).mean()
    run.update(softplus(better - run.model(bad).mean() - reference))


def applied_three_times(run: Training) -> None:
    """A model whose output is its next input."""
    x = run.inputs
    for _ in range(3):
        x = run.model(x)
    run.update(x.square().mean())


def measured_with_gradients(run: Training) -> None:
    """Metrics of the same size without ``no_grad``: before backward, and after the step."""
    loss = run.model(run.inputs).square().mean()
    run.model(run.inputs[:2]).sum().item()
    run.update(loss)
    run.model(run.inputs).sum().item()


def scored_with_gradients(run: Training) -> None:
    """A forward of the same inputs after the step, without ``no_grad``; no backward follows it."""
    run.update(run.model(run.inputs).square().mean())
    run.model(run.inputs).sum().item()


def in_turns(run: Training) -> None:
    """Two models whose gradients add up over two batches, before both make a step; the losses need memory, too."""
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    for i in range(2):
        for model in (run.model, run.other):
            model(run.inputs + i).repeat(64, 1, 1).square().mean().backward()
    for optimizer in run.optimizers:
        optimizer.step()


def generated(run: Training) -> None:
    """What the model writes, a longer text in each forward, is what it then learns from."""
    x = run.inputs[:, :16]
    with torch.no_grad():
        for _ in range(8):
            x = torch.cat([x, run.model(x)[:, -6:]], dim=1)
    run.update(run.model(x).square().mean())


def against_each_other(run: Training) -> None:
    """A GAN: the other model judges twice, and the model learns from its judgement in every second step."""
    made = run.model(run.inputs)
    run.update(softplus(-run.other(run.inputs)).mean() + softplus(run.other(made.detach())).mean(), which=1)
    if run.lengths.random() < 0.5:
        run.update(softplus(-run.other(made)).mean())


PROGRAMS: tuple[Callable[[Training], None], ...] = (
    accumulated,
    preferred,
    with_itself_as_reference,
    applied_three_times,
    measured_with_gradients,
    scored_with_gradients,
    in_turns,
    generated,
    against_each_other,
)


@pytest.fixture
def train(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Training]:
    """Run a program on a ``Training``, and read the peak of each step, which ``fit`` resets within it."""
    reset = torch.accelerator.reset_peak_memory_stats
    peaks: list[int] = []

    def read_and_reset(_: object = None) -> None:
        peaks[-1:] = [max(*peaks[-1:], torch.accelerator.max_memory_allocated(device))]
        reset(device)

    def run(program: Callable[[Training], None], into: Training) -> Training:
        peaks[:] = into.peaks
        for _ in range(STEPS):
            torch.accelerator.synchronize()
            reset(device)
            peaks.append(0)
            program(into)
            torch.accelerator.synchronize()
            read_and_reset()
        into.peaks = peaks[1:]
        return into

    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", read_and_reset)
    return run


@pytest.fixture(scope="module")
def without() -> dict[str, tuple[list[torch.Tensor], int]]:
    """By program: the weights after a run without ``fit``, and its peak."""
    return {}


@pytest.mark.first_tier(program=(accumulated,), stages=(MOVED,))
@pytest.mark.full_tier(program=(with_itself_as_reference,))
@pytest.mark.full_tier(program=(preferred, applied_three_times, generated, against_each_other), stages=(RECOMPUTED,))
@pytest.mark.full_tier(share=(0.8,))
@pytest.mark.parametrize("share", [0.6, 0.8])
@pytest.mark.parametrize("stages", [MOVED, RECOMPUTED], ids=["moved", "recomputed"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_step_is_over_the_budget(
    program: Callable[[Training], None],
    stages: tuple[dh.Recompute | dh.OnCpu, ...],
    share: float,
    device: torch.device,
    train: Callable[..., Training],
    without: dict[str, tuple[list[torch.Tensor], int]],
) -> None:
    if program.__name__ not in without:
        plain = train(program, Training(device))
        without[program.__name__] = plain.weights(), max(plain.peaks)
        del plain
    weights, most = without[program.__name__]
    run, budget = Training(device), int(share * most)
    with dh.fit(run.model, budget, *stages), dh.fit(run.other, budget, *stages):
        train(program, run)
    assert max(run.peaks) <= budget, run.peaks
    assert max(run.peaks) >= 0.8 * budget, run.peaks
    assert all(torch.equal(*pair) for pair in zip(run.weights(), weights, strict=True))


def one_after_the_other(run: Training) -> None:
    """The output of one model is the input of the other one, and one backward goes through both."""
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    run.other(run.model(run.inputs)).square().mean().backward()
    for optimizer in run.optimizers:
        optimizer.step()


def test_two_models_that_keep_nothing_say_that_the_budget_is_too_small(device: torch.device) -> None:
    run = Training(device)
    with dh.fit(run.model, "6 MiB"), dh.fit(run.other, "6 MiB"):
        one_after_the_other(run)
        with pytest.raises(UsageError, match="with every saved tensor moved"):
            one_after_the_other(run)


def test_a_model_does_not_say_so_while_the_other_one_keeps_tensors(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training(device)
    with dh.fit(run.model, "6 MiB") as first, dh.fit(run.other, "6 MiB"):
        monkeypatch.setattr(Fitted, "_limit", lambda self, _: (1 << 30) if self is first else 0)
        for _ in range(3):
            one_after_the_other(run)
        assert first.report().peak > 6 << 20


def test_two_models_in_turns_both_have_the_whole_room(device: torch.device, train: Callable[..., Training]) -> None:
    """Neither counts the other's tensors as needed, because they are never alive together."""
    most = max(train(in_turns, Training(device)).peaks)
    run = Training(device)
    with dh.fit(run.model, int(0.65 * most)) as first, dh.fit(run.other, int(0.65 * most)) as second:
        train(in_turns, run)
        limits = first.report().limit, second.report().limit
    assert max(run.peaks) <= 0.65 * most
    assert min(limits) >= 0.8 * max(limits) > 4 << 20


def test_copies_that_are_under_way_when_another_model_starts_do_not_count_as_memory_that_lies_there(
    sim: torch.device,
) -> None:
    """They may be over when the peak comes, so the second model would seem to need less than it does."""
    run, store, under_way = Training(sim), dh.OnCpu(), []

    def look(*_: object) -> None:
        under_way.append(device_bytes(store, sim))
        assert second._round is not None
        assert second._round.begin == torch.accelerator.memory_allocated(sim) - under_way[-1]

    with dh.fit(run.model, "24 MiB", store), dh.fit(run.other, "24 MiB", dh.OnCpu()) as second:
        run.other.register_forward_pre_hook(look)
        for events in (0, simulated.FOR_EVER):
            with simulated.ahead(events):
                made = run.model(run.inputs)
                judged = run.other(made.detach())
            run.update(judged.square().mean(), which=1)
    assert under_way[-1] > 512 << 10
