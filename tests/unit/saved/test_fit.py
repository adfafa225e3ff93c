"""``fit`` on the CPU: what is free there."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import memory
from disthooks.saved.stores.host import container_memory, node_memory


@pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
def test_each_process_of_a_node_takes_its_part_of_what_is_free(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    model = nn.Linear(64, 64)
    with dh.fit(model, "free", dh.OnDisk(tmp_path)) as fitted:
        assert fitted.report().budget == 0
        model(torch.ones(64, 64)).sum().backward()
    left = min(found[0] for found in (node_memory(), container_memory()) if found)
    assert fitted.report().budget == pytest.approx(0.95 * (memory.resident() + left / 4), rel=0.1)
