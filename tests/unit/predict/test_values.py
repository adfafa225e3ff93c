"""Small tensors of integers and truth values have their values in a fake run."""

from __future__ import annotations

import torch
from torch import nn

from disthooks import explain
from disthooks.predict.fake.fake_run import fake_run
from disthooks.predict.fake.kernels import FakeKernels
from disthooks.predict.fake.values import Values, value_of
from tests.support.predicted import beside


class Masked(nn.Module):
    """Saves the rows that a mask of the user's chooses, and more of them if the mask masks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear(x if bool(mask.all()) else x[mask])


def test_a_mask_of_the_users_has_its_values() -> None:
    x, mask = torch.ones(8, 4), torch.arange(8) % 4 == 0
    said = explain(Masked(), x, mask, device="cpu")
    assert said.record.counted()[-1].shape == (2, 4)
    assert said.unknown == ()
    whole = explain(Masked(), x, torch.ones(8, dtype=torch.bool), device="cpu")
    assert whole.record.counted()[-1].shape == (8, 4)


def test_a_single_float_of_the_users_can_be_copied() -> None:
    """Its value is real memory: a copy of it once read memory that nobody had."""
    real = torch.tensor(2.5)
    with fake_run() as fakes:
        fake = fakes.like(real)
        assert float(fake.clone() + 1) == 3.5


def test_a_value_that_is_overwritten_by_an_unknown_is_lost() -> None:
    with fake_run():
        known = torch.zeros(3, dtype=torch.int64)
        view = known[:2]
        assert value_of(view) is not None
        known.copy_(torch.randn(3))
        assert value_of(known) is None
        assert value_of(view) is None


def test_what_is_chosen_is_chosen_evenly_and_named() -> None:
    told: list[tuple[str, str]] = []
    with fake_run() as fakes:
        fakes.tell(lambda what, assumed: told.append((what, assumed)))
        chosen = torch.randn(8, 4).topk(2).indices
        assert value_of(chosen) is not None
        assert chosen.flatten().bincount(minlength=4).tolist() == [4, 4, 4, 4]
    assert told == [("what topk chooses", "each of 4 equally often")]


def test_writing_by_a_mask_keeps_the_values() -> None:
    """Tensor parallelism does so with the tokens that a rank has no row of the embedding for."""
    with FakeKernels() as mode, Values(mode):
        tokens = torch.arange(12).view(2, 6)
        tokens[(tokens < 3) | (tokens >= 9)] = 0
        assert tokens.sum().item() == sum(range(3, 9))


def test_torch_knows_whether_a_mask_is_causal() -> None:
    """A causal mask is not given to attention, so another one saves more."""
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    for mask in (causal, causal.clone().fill_diagonal_(float("-inf"))[:, [1, 0, 2, 3]]):

        def build(mask: torch.Tensor = mask) -> tuple[nn.Module, dict[str, torch.Tensor]]:
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            return nn.TransformerEncoder(layer, 1), {"src": torch.ones(2, 4, 8), "mask": mask}

        found = beside(build, peaks=False)
        assert found.wrong() == {}
        assert found.predicted.unknown == ()


def test_a_tensor_of_one_number_may_be_a_placeholder() -> None:
    with fake_run() as fakes:
        assert value_of(fakes.like(torch.zeros(3))) is None
        assert value_of(fakes.like(torch.tensor([0.0, float("-inf")]))) is not None
        made = torch.zeros(3)
        assert value_of(made) is not None
        assert value_of(fakes.like(made)) is None


def test_a_tensor_with_other_memory_has_no_value() -> None:
    """DeepSpeed takes the memory of a parameter in this way."""
    with fake_run():
        for size in (0, 4096):
            known = torch.ones(4096)
            assert value_of(known) is not None
            known.data = torch.empty(size)
            assert value_of(known) is None
            assert known.view(-1).shape == (size,)
