"""Law 2, weights stay: no parameter, view of one, or replica's copy ever goes to a store."""

from __future__ import annotations

import pathlib

import pytest
import torch
from replicas import replicate
from torch import nn

import disthooks as dh


def _stored(store_folder: pathlib.Path, run: object) -> dh.SavedReport:
    with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(store_folder))) as saved:
        y = run()
    y.sum().backward()
    return saved.report()


def test_parameters_and_their_views(tmp_path: pathlib.Path) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(8, 64, requires_grad=True)
    report = _stored(tmp_path, lambda: x @ weight + x @ weight.t() + x @ weight.view(64, 64)[:].t())
    assert report.stored == x.nbytes
    assert report.kept_by["parameter"] == 3 * weight.nbytes


def test_a_linear_layer_stores_its_input_alone(tmp_path: pathlib.Path) -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(8, 64, requires_grad=True)
    assert _stored(tmp_path, lambda: layer(x)).stored == x.nbytes


def test_replicas_keep_their_copies(tmp_path: pathlib.Path) -> None:
    model = dh.SaveToDisk(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), tmp_path, at_least=0)
    for copy in replicate(model, 2):
        copy(torch.randn(8, 64, requires_grad=True)).sum().backward()
    report = model.report()
    assert report.kept_by["parameter"] == 2 * 2 * 64 * 64 * 4
    assert report.stored == 2 * 2 * 8 * 64 * 4  # two inputs for each replica; the ReLU shares the second


def test_a_buffer_and_a_detached_weight_stay(tmp_path: pathlib.Path) -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x * self.mask, self.weight.detach()) + self.mask[:1]

    layer = Masked(64, 64)
    layer.register_buffer("mask", torch.rand(8, 64))
    wrapped = dh.SaveToDisk(layer, tmp_path, at_least=0)
    wrapped(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert wrapped.report().stored == 0
    assert wrapped.report().kept_by == {"buffer": layer.mask.nbytes, "parameter": layer.weight.nbytes}


def test_an_autocast_copy_stays(tmp_path: pathlib.Path) -> None:
    layer = nn.Linear(64, 64)
    x = torch.randn(8, 64, requires_grad=True)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    run().sum().backward()
    truth, layer.weight.grad, x.grad = (layer.weight.grad, x.grad), None, None
    report = _stored(tmp_path, run)
    assert report.kept_by["autocast weight"] == layer.weight.numel() * 2
    assert report.stored == x.numel() * 2
    assert torch.equal(layer.weight.grad, truth[0])
    assert torch.equal(x.grad, truth[1])


def test_a_weight_that_changed_since_is_caught(tmp_path: pathlib.Path) -> None:
    layer = nn.Linear(64, 64)
    with dh.saving(dh.OnDisk(tmp_path)):
        y = layer(torch.randn(8, 64, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(dh.errors.MutationError, match="inplace"):
        y.sum().backward()
