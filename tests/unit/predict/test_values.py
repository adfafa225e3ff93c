"""Small tensors of integers and truth values have their values in a fake run."""

from __future__ import annotations

import torch
from torch import nn

from disthooks import explain
from disthooks.predict.fake.fake_run import fake_run
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
