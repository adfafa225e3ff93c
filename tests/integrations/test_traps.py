"""What accelerate does with what it does not know: the reasons why disthooks is configured and wrapped as it is."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline

pytest.importorskip("accelerate", reason="accelerate is not installed")

NAMES = ("blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def test_a_section_in_its_file_is_refused_and_a_key_further_in_is_lost(tmp_path: pathlib.Path) -> None:
    """Why the configuration is a file of its own, and not in accelerate's, nor inside ``fsdp_config``."""
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: 'no'\nuse_cpu: false\n"
    file.write_text(f"{text}disthooks: {{watch: {{stats: standard}}}}\n")
    with pytest.raises(ValueError, match="unknown keys"):
        load_config_from_file(str(file))
    file.write_text(f"{text}fsdp_config: {{disthooks: hooks.yaml}}\n")
    assert load_config_from_file(str(file)).fsdp_config == {"disthooks": "hooks.yaml"}, "nobody says it is unknown"


def test_a_handler_of_ones_own_is_a_bare_key_error() -> None:
    """Why disthooks has none; when this fails, there may be one."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedDataParallelKwargs

    class Handler(DistributedDataParallelKwargs):
        pass

    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(KeyError):
        Accelerator(cpu=True, kwargs_handlers=[Handler()])
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_unwrapping_leaves_the_hooks(way: str) -> None:
    """``extract_model_from_parallel`` takes off whatever has an attribute ``module``."""
    from accelerate.utils import extract_model_from_parallel

    model = Net()
    if way == "wrapped":
        saving = model.blocks[1] = dh.SaveWith(model.blocks[1], pipeline(dh.OnDisk("/tmp"), at_least=0))
    else:
        saving = dh.save_activations(model, "blocks.1", pipeline(dh.OnDisk("/tmp"), at_least=0))
    unwrapped = extract_model_from_parallel(model, recursive=True)
    assert tuple(unwrapped.state_dict()) == NAMES
    unwrapped(torch.randn(3, 4)).sum().backward()
    assert saving.report().moved > 0
