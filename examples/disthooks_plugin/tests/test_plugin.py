"""The conformance tests of disthooks, on the codec and the store of this package, and what is their own."""

from __future__ import annotations

import pytest
import torch
from disthooks_plugin import Runs, Zipped

import disthooks as dh
from disthooks.testing import CodecTests, StoreTests


class TestRuns(CodecTests):
    @pytest.fixture(params=[Runs(), Runs(at_least=0)], ids=repr)
    def codec(self, request: pytest.FixtureRequest) -> Runs:
        return request.param

    def test_a_mask_gets_smaller(self, codec: Runs) -> None:
        encoded, _ = codec.encode(torch.arange(1024) < 100)
        assert sum(tensor.nbytes for tensor in encoded) < 20


class TestZipped(StoreTests):
    @pytest.fixture
    def store(self) -> Zipped:
        return Zipped()


def test_a_configuration_names_them() -> None:
    entry = {"modules": "*", "codecs": [{"kind": "Runs"}], "store": {"kind": "Zipped", "level": 9}}
    ((_, stages),) = dh.config.from_config({"save": [entry]}).saves
    assert stages.codecs == (Runs(),)
    assert stages.store == Zipped(9)
