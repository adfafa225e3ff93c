"""Lightning Fabric: what ``setup`` returns is looked through, so that names are the user's own."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline

fabric = pytest.importorskip("lightning.fabric", reason="Lightning is not installed")


def test_names_are_those_of_the_users_model(tmp_path: pathlib.Path) -> None:
    """On one device; DDP's own shell is looked through in the same way."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64)
    plain(x).sum().backward()
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters()])).item()
    plain.zero_grad()
    lightning = fabric.Fabric(accelerator="cpu", devices=1)
    model, optimizer = lightning.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    saving = dh.save_activations(model, "0", pipeline(dh.OnDisk(tmp_path), at_least=0))
    seen = dh.on_gradient(model, "*", lambda gradient: gradient)
    with saving, seen, dh.gradients(model, optimizer, stats=[dh.stats.Norm()], every=1) as watch:
        assert (saving.names, seen.names) == (("0",), ("0.weight", "0.bias"))
        lightning.backward(model(x).sum())
        optimizer.step()
        watch.flush()
        assert watch.latest["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert set(seen.report().values()) == {1}
    assert saving.report().moved == x.nbytes


def test_what_is_attached_says_what_it_is(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        dh.save_activations(model, "?", dh.OnDisk(tmp_path)) as saving,
        dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=[dh.stats.Norm()]) as watch,
        dh.on_gradient(model, "0.*", torch.zeros_like) as seen,
    ):
        assert repr(saving).startswith("<SavingHandle of 5 modules (0, 1, 2 and 2 more) to OnDisk(")
        assert repr(watch).startswith("<Gradients on ")
        assert "10 parameters, 0 steps, rules: " in repr(watch)
        assert "ClipNorm" in repr(watch)
        assert repr(seen) == "<OnGradient of 2 parameters (0.weight, 0.bias), at='final'>"
