"""A loop of one's own in the manner of torchtitan: checkpointing and compiling by block, fully_shard, DCP."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import disthooks as dh
from tests.support.models import Tiny, tokens
from tests.support.ranks.harness import Ranks

pytestmark = pytest.mark.dist


def _parallel(compiled: bool) -> nn.Module:
    """In torchtitan's order: a checkpoint around each block, the compiler around that, then fully_shard."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = Tiny(), init_device_mesh("cpu", (2,))
    for name, block in list(model.blocks.named_children()):
        block = checkpoint_wrapper(block, preserve_rng_state=False) if name == "0" else block  # selective
        block = torch.compile(block, backend="eager") if compiled else block
        model.blocks.register_module(name, block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.eval()  # no dropout, which a checkpoint would need the generator's state for


def _train(rank: int, model: Any, optimizer: Any, watch: Any, steps: range) -> list[float]:
    """Two micro-batches a step, the loop's own clipping; the norms that it found."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for micro in (0, 1):
            model.set_requires_gradient_sync(micro == 1)
            (model(tokens(seed=100 * step + 10 * micro + rank)).square().mean() / 2).backward()
        if watch is not None:
            watch.begin_step()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).full_tensor()))
        optimizer.step()
    return norms


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def _run(rank: int, folder: str, compiled: bool) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    made = [_parallel(compiled) for _ in range(3)]
    models = [(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in made]
    (plain, own), (hooked, optimizer), (later, resumed) = models
    config = {
        "save": [{"modules": "blocks.*", "at_least": "1 KiB", "store": {"kind": "OnDisk", "directory": folder}}],
        "watch": {"every": 1, "stats": [{"kind": "Norm"}]},
    }
    norms = _train(rank, plain, own, None, range(4))
    keys = list(_state(plain, own)["model"])
    with dh.prepare(hooked, optimizer, config) as attached:
        found = _train(rank, hooked, optimizer, attached.gradients, range(2))
        state = _state(hooked, optimizer)
        dcp.save(state, checkpoint_id=f"{folder}/dcp")
        attached.gradients.flush()
        latest = attached.gradients.latest["grad_norm"]
        found += _train(rank, hooked, optimizer, attached.gradients, range(2, 4))
    dist.barrier()
    target = _state(later, resumed)  # a run without disthooks goes on from the checkpoint
    dcp.load(target, checkpoint_id=f"{folder}/dcp")
    parts = {"model_state_dict": target["model"], "optim_state_dict": target["optimizer"]}
    set_state_dict(later, resumed, **parts)
    _train(rank, later, resumed, None, range(2, 4))
    return {
        "moved": attached.report().moved,
        "keys": list(state["model"]) == keys,
        "norm": latest / norms[1] - 1,
        "norms": found == norms,
        "same": _same(plain, hooked),
        "resumed": _same(plain, later),
        "steps": attached.gradients.steps,
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_loop_of_ones_own(ranks: Ranks, tmp_path: pathlib.Path, compiled: bool) -> None:
    """The same bits as without, also from a checkpoint; the norm is the loop's own, from before it clips."""
    for found in ranks(_run, str(tmp_path), compiled):
        assert found.pop("moved") > 0
        assert abs(found.pop("norm")) < 1e-5
        assert found == {"keys": True, "norms": True, "same": True, "resumed": True, "steps": 4}


def _linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_a_step_that_was_begun_in_a_closure_that_raised_counts_once() -> None:
    """The next step has the same gradients, so rules do not act on them again."""
    model, optimizer = _linear()

    def closure() -> torch.Tensor:
        model(torch.ones(2, 3)).sum().backward()
        watch.begin_step()
        raise KeyError("the loop's own")

    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]) as watch:
        with pytest.raises(KeyError, match="the loop's own"):
            optimizer.step(closure)
        assert watch.steps == 0
        optimizer.step()
        assert watch.steps == 1
        optimizer.step(lambda: model(torch.ones(2, 3)).sum().backward())
        assert watch.steps == 2
