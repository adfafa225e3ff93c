"""Whether a step fits, the largest batch and the longest sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from disthooks.errors import UsageError
from disthooks.predict.answers.fits import fits, verdict
from disthooks.predict.fake.builder import Builder
from disthooks.predict.run import Situation
from tests.support import oracle, zoo

ON_CPU = Situation(device="cpu")
WIDE = 256


def mlp() -> nn.Sequential:
    """One hidden layer without biases: 64 to 256 to 1."""
    return nn.Sequential(nn.Linear(64, WIDE, bias=False), nn.ReLU(), nn.Linear(WIDE, 1, bias=False))


def mlp_bytes(batch: int) -> int:
    """The peak of a step of ``mlp``, by hand.

    It is in the backward of the ReLU: there are the weights, the gradient of the last layer, the input, the output with
    its gradient (torch holds the roots), the ReLU's output (the first layer's is gone), its gradient, and the gradient
    that the ReLU's backward makes.
    """
    weights = 64 * WIDE + WIDE
    return 4 * (weights + WIDE + batch * (64 + 3 * WIDE + 2))


class Scores(nn.Module):
    """Attention whose scores are all saved: (tokens, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


def test_the_largest_batch_is_that_of_the_closed_form() -> None:
    limit = 1 << 22
    found = fits(Builder(mlp(), (torch.empty(8, 64),)), ON_CPU, limit)
    largest = max(batch for batch in range(10_000) if mlp_bytes(batch) <= limit)
    assert (found.batch.size, found.batch.nbytes) == (largest, mlp_bytes(largest))
    assert (found.batch.next_size, found.batch.next_nbytes) == (largest + 1, mlp_bytes(largest + 1))
    assert found.batch.end == "limit"
    assert found.does_fit
    assert found.change is None
    assert found.batch.probes <= 6


def test_the_longest_sequence_of_quadratic_memory_is_the_one_that_a_scan_finds() -> None:
    builder = Builder(Scores(), (torch.zeros(1, 8, dtype=torch.int64),))
    limit = 300_000

    def nbytes(seq: int) -> int:
        model = Scores()
        ids = torch.zeros(1, seq, dtype=torch.int64)
        loss: Any = model(ids)
        with oracle.LivingStorages(model, (ids,)) as living:
            loss = model(ids)
            loss.backward(torch.empty_like(loss))
        return living.peak

    found = fits(builder, ON_CPU, limit, sizes=["seq"])
    assert found.batch is None
    assert found.seq.size is not None
    assert nbytes(found.seq.size) <= limit < nbytes(found.seq.size + 1)
    assert found.seq.nbytes == nbytes(found.seq.size)
    assert found.seq.probes <= 9


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_an_optimizer_that_is_not_counted_is_said(optimizer: Any) -> None:
    found = fits(Builder(mlp(), (torch.empty(8, 64),)), replace(ON_CPU, optimizer=optimizer), 1 << 22)
    assert ("the state of an optimizer is not counted" in "".join(verdict(found.explanation, found.limit))) == (
        optimizer is None
    )


def test_nothing_fits() -> None:
    found = fits(Builder(mlp(), (torch.empty(8, 64),)), ON_CPU, 4 * 64 * WIDE, sizes=["batch"])
    assert not found.does_fit
    assert (found.batch.size, found.batch.nbytes, found.batch.next_size, found.batch.end) == (0, 0, 1, "limit")
    assert "no batch fits, not even 1" in found.batch.text


def test_everything_fits_up_to_the_end_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disthooks.predict.answers.fits.MOST", 1000)
    found = fits(Builder(mlp(), (torch.empty(8, 64),)), ON_CPU, 1 << 40, sizes=["batch"])
    assert (found.batch.size, found.batch.end, found.batch.next_size) == (1000, "most", None)
    assert found.batch.probes == 4  # 8, 16, 256, 1000
    assert found.batch.text.startswith("the largest batch is at least 1000, with")


def test_a_table_of_positions_is_the_end_of_a_sequence() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.wpe = nn.Embedding(50, 8), nn.Embedding(96, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tokens(ids) + self.wpe(torch.arange(ids.shape[1]))

    found = fits(Builder(Learned, (torch.zeros(2, 16, dtype=torch.int64),)), ON_CPU, 1 << 30, sizes=["seq"])
    assert (found.seq.size, found.seq.end, found.seq.next_size) == (96, "refused", 112)
    assert "wpe has 96 positions" in found.seq.text
    assert "at least" not in found.seq.text


def test_a_size_that_cannot_be_set_is_said() -> None:
    found = fits(Builder(mlp(), (torch.empty(8, 64),)), ON_CPU, 1 << 30)
    assert found.seq.size is None
    assert found.seq.end == "unset"
    two = Builder(nn.Bilinear(4, 4, 2), (torch.empty(3, 4), torch.empty(3, 4)))
    assert two.size("batch") == 3
    with pytest.raises(UsageError, match="argument 'batch'"):
        Builder(nn.Identity(), (torch.empty(3, 4), torch.empty(5, 4))).size("batch")


def test_a_function_that_takes_the_batch_gets_it() -> None:
    seen: list[int] = []

    def build(batch_size: int = 6) -> Any:
        seen.append(batch_size)
        return mlp(), torch.empty(batch_size, 64)

    found = fits(Builder(build), ON_CPU, 1 << 20, sizes=["batch"])
    assert found.batch.size in seen
    assert found.batch.next_size in seen


def test_a_step_that_is_too_large_comes_down() -> None:
    builder, limit = Builder(mlp(), (torch.empty(4096, 64),)), 1 << 20
    down = fits(builder, ON_CPU, limit, sizes=["batch"]).batch
    up = fits(Builder(mlp(), (torch.empty(1, 64),)), ON_CPU, limit, sizes=["batch"]).batch
    assert down.size == up.size


def test_impatience_ends_the_search_and_says_so() -> None:
    found = fits(Builder(mlp(), (torch.empty(8, 64),)), ON_CPU, 1 << 22, sizes=["batch"], patience=0).batch
    assert (found.size, found.end, found.probes) == (8, "patience", 1)
    assert found.text.startswith("the largest batch is at least 8, with")
    none = fits(Builder(mlp(), (torch.empty(8, 64),)), ON_CPU, 1, sizes=["batch"], patience=0).batch
    assert none.text == "no batch that was tried fits; the time of the search was over, so a smaller one may fit"


def test_each_step_is_told() -> None:
    lines: list[str] = []
    found = fits(Builder(mlp(), (torch.empty(8, 64),)), ON_CPU, 1 << 22, sizes=["batch"], progress=lines.append)
    assert len(lines) == found.batch.probes
    assert lines[-1].startswith(f"batch {found.batch.size + 1}: ")
    assert lines[-1].endswith("too much")


@pytest.mark.second_tier
@pytest.mark.parametrize("name", zoo.FITS)
def test_the_largest_batch_is_the_one_that_bisection_over_real_steps_finds(name: str) -> None:
    wanted = 4 + len(name) % 5
    situation = Situation(device="cpu", loss=oracle.loss_of)
    model, inputs = zoo.build(name, batch=wanted)
    limit = oracle.measure(model, inputs).peak_bytes + 1000
    found = fits(Builder(zoo.ZOO[name]), situation, limit, sizes=["batch"]).batch
    assert found.size is not None
    assert found.size == oracle.largest_batch(lambda batch: zoo.build(name, batch=batch), limit, most=64)


class Dozens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 12:
            raise ValueError("give a multiple of twelve")
        return self.linear(x).tanh()


@pytest.mark.parametrize("start", [12, 36])
def test_a_model_that_takes_multiples_alone_is_asked_for_multiples_of_what_was_given(start: int) -> None:
    situation = Situation(device="cpu", loss=oracle.loss_of)
    found = fits(Builder(Dozens(), (torch.empty(start, 64),)), situation, 1_000_000, sizes=["batch"]).batch
    assert found.size is not None
    assert (found.size % start, found.next_size, found.end) == (0, found.size + start, "limit")
    peaks = [oracle.measure(Dozens(), torch.ones(size, 64)).peak_bytes for size in (found.size, found.size + start)]
    assert peaks == [found.nbytes, found.next_nbytes]
