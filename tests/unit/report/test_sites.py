"""What each module's saved tensors came to, and how little of it is printed."""

from __future__ import annotations

import pathlib

import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from disthooks.saved.report import SavedReport, SiteReport


def test_sites_add_up_to_the_totals(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)])
    store = dh.OnDisk(tmp_path)
    with dh.save_activations(model, "?", pipeline(store, at_least=0)) as saving:
        for _ in range(2):
            y = model(torch.randn(128, 64))
            store.wait()
            y.square().mean().backward()
    report = saving.report()
    assert set(report.sites) == {"0", "1", "2"}
    for name in ("tensors", "stored", "moved", "shared", "kept", "loaded", "pack_seconds", "unpack_seconds"):
        assert getattr(report, name) == sum(getattr(site, name) for site in report.sites.values())
    activation = 128 * 64 * 4
    first, second = report.sites["0"], report.sites["1"]
    assert (second.saved, second.stored, second.moved, second.tensors) == (4 * activation,) * 3 + (4,)
    assert first.loaded == first.stored
    assert second.kept == 2 * 64 * 64 * 4  # the weight, in each forward
    assert second.pack_seconds > 0
    assert second.unpack_seconds > 0
    assert second.copy_seconds > 0  # it was written and read
    assert second.codec_seconds == 0


def test_what_codecs_do_is_told_apart() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(dh.Cast(torch.bfloat16), dh.Tiered(dh.OnDevice("1 MiB"), dh.OnCpu()), at_least=0) as saved:
        y = x.exp()
    y.sum().backward()
    (site,) = saved.report().sites.values()
    assert (site.saved, site.stored) == (x.nbytes, x.nbytes // 2)
    assert site.codec_seconds > 0
    assert site.copy_seconds == 0


class Block(nn.Module):
    """Saves an activation, a copy of a weight, and a wide copy of what is narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            narrow = torch.relu(self.linear(self.norm(x)))
        wide = narrow.float()
        return wide.exp() * wide


def test_what_is_dropped_is_of_its_module_and_nothing_is_counted_twice(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(), Block()), torch.randn(256, 64)

    def sites(*stages: object) -> dict[str, SiteReport]:
        with dh.save_activations(model, "?", pipeline(*stages, dh.OnDisk(tmp_path), at_least=0)) as saving:
            for _ in range(2):
                model(x).sum().backward()
        report = saving.report()
        for name in ("recast", "recomputed"):
            assert getattr(report, name) == sum(getattr(site, name) for site in report.sites.values())
        return report.sites

    def every(site: SiteReport) -> int:
        return site.saved + site.shared + site.kept + site.recast + site.recomputed

    plain, again = sites(), sites(dh.Recompute())
    assert {name: every(site) for name, site in plain.items()} == {name: every(site) for name, site in again.items()}
    for name in ("0", "1"):
        assert plain[name].recomputed == 0
        assert plain[name].recast == again[name].recast == 2 * 64 * 64 * 2
        assert again[name].recomputed == plain[name].saved - again[name].saved > 0


def test_functions_have_the_name_of_their_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    with dh.save_activations(model, "1", dh.Functions(lambda t: t.detach(), lambda t: t)) as saving:
        model(torch.randn(4, 8)).sum().backward()
    assert saving.report().sites["1"].stored == saving.report().sites["1"].loaded == 4 * 8 * 4


def test_sums_and_text() -> None:
    one = SavedReport(calls=1, sites={"a": SiteReport(tensors=1, saved=2048), "b": SiteReport(kept=1)})
    two = SavedReport(calls=1, sites={"a": SiteReport(tensors=2, saved=1), "": SiteReport(saved=9), "c": SiteReport()})
    both = one + two
    assert both.sites["a"] == SiteReport(tensors=3, saved=2049)
    assert set(both.sites) == {"a", "b", "", "c"}
    assert "most in a 2.0 KiB, outside of modules 9 B, b 1 B, and 1 more" in str(both)
    moved = SavedReport(calls=1, sites={"a": SiteReport(saved=9), "b": SiteReport(saved=2, moved=2)})
    assert "most in b 2 B, a 9 B" in str(moved)
    assert "most in" not in str(SavedReport(calls=1, sites={"a": SiteReport(saved=1)}))
