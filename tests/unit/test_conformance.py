"""The conformance tests for other packages, run on the kinds of this library, and on kinds that are wrong."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, ClassVar

import pytest
import torch

import disthooks as dh
from disthooks.saved.codecs import Codec
from disthooks.testing import CodecTests, RuleTests, SinkTests, StatTests, StoreTests, _on_ranks
from tests.support import seeds


@pytest.fixture(scope="module", autouse=True)
def _ranks_take_the_same_seeds() -> None:
    if os.environ.get("DISTHOOKS_SEED"):
        _on_ranks(seeds.on_rank)


class TestCodecs(CodecTests):
    most_error = 0.3

    @pytest.fixture(
        params=[dh.Cast(torch.bfloat16), dh.Cast(torch.float8_e4m3fn), dh.Compact(), dh.Quantize(4)],
        ids=repr,
    )
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return request.param


class TestStores(StoreTests):
    @pytest.fixture(params=["OnCpu", "OnDevice", "OnDisk", "Tiered"])
    def store(self, request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Any:
        made = {
            "OnCpu": lambda: dh.OnCpu(),
            "OnDevice": lambda: dh.OnDevice(),
            "OnDisk": lambda: dh.OnDisk(tmp_path),
            "Tiered": lambda: dh.Tiered(dh.OnDevice("64 KiB"), dh.OnDisk(str(tmp_path))),
        }
        return made[request.param]()


class TestRules(RuleTests):
    @pytest.fixture(
        params=[
            dh.ClipAdaptive(0.01),
            dh.ClipNorm(0.1),
            dh.ClipPercentile(20, 5),
            dh.ClipValue(-0.01, 0.01),
            dh.ClipZScore(warmup_steps=2),
            dh.Sanitize(),
            dh.Scale(0.5),
            dh.SkipNonFinite(),
            dh.only("*.bias", dh.ClipNorm(0.01)),
        ],
        ids=repr,
    )
    def rule(self, request: pytest.FixtureRequest) -> Any:
        return request.param


APART = ("Loss", "NoiseScale", "Times")  # two trainings never have the same times, and only a loop has the loss
OF_RANKS = ("Activations", "Fingerprints", "RankMaxAbs", "Spread")


class TestStats(StatTests):
    @pytest.fixture(
        params=sorted(
            {*dh.stats.__all__} - {"Found", "Stat", "full", "standard", *OF_RANKS, "Loss", "NoiseScale", "Times"}
        )
    )
    def stat(self, request: pytest.FixtureRequest) -> Any:
        return getattr(dh.stats, request.param)()


class TestStatsOfRanks(StatTests):
    of_ranks = True

    @pytest.fixture(params=OF_RANKS)
    def stat(self, request: pytest.FixtureRequest) -> Any:
        return getattr(dh.stats, request.param)()


class TestJsonl(SinkTests):
    @pytest.fixture
    def sink(self, tmp_path: pathlib.Path) -> Any:
        return dh.sinks.Jsonl(tmp_path / "log.jsonl")

    def written(self, sink: Any) -> list[str]:
        return [name for line in pathlib.Path(sink.path).read_text().splitlines() for name in json.loads(line)]


def test_a_sink_that_drops_what_appears_later_is_found() -> None:
    kept: list[str] = []

    class Drops(SinkTests):
        def written(self, sink: Any) -> list[str]:
            return kept

    def takes_the_first(record: dict[str, Any]) -> None:
        kept.extend(() if kept else record)

    with pytest.raises(AssertionError, match="drops names that are not in its first record"):
        Drops().test_it_takes_what_is_logged(takes_the_first)


class TestConsole(SinkTests):
    @pytest.fixture
    def sink(self) -> Any:
        return dh.sinks.Console()


class TestFunction(SinkTests):
    in_files: ClassVar[bool] = False

    @pytest.fixture
    def sink(self) -> Any:
        return lambda record: None
