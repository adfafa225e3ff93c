"""What saved-tensor hooks have to show on an engine, whichever it is; the files test_saved_*.py say on which ones."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import disthooks as dh
from disthooks._torch import StorageRef
from disthooks.saved.report import SavedReport
from tests.support.engines import unsynced
from tests.support.models import identical, stores, tokens
from tests.support.ranks.harness import Ranks

#: Four processes, for a mesh of two dimensions; they start when they are first called.
FOUR = Ranks(world=4)
atexit.register(FOUR.stop)
HOWS = ["before", "after", "wrappers"]
KINDS = list(stores("/tmp"))
EVERY = "disk, every tensor"
Make = Callable[[], nn.Module]
Engine = Callable[[nn.Module], Any]
Train = Callable[[Any], list[torch.Tensor]]


class Found(NamedTuple):
    """Gradients and weights of a short training, and what was saved in it."""

    numbers: list[torch.Tensor]
    report: SavedReport


class Proof(NamedTuple):
    """What a test asserts of one pipeline on one engine."""

    identical: bool  # to the same engine without hooks, bit for bit
    back: bool  # bytes came back from where they were
    held: int
    as_plain: bool  # the same bytes were stored as in one process: no weights among them
    weights_kept: bool


#: What every pipeline has to show on every engine.
GOOD = {kind: Proof(True, True, 0, True, True) for kind in KINDS}
#: The two that have least in common, for an engine's many options.
FEW = [EVERY, "functions"]
FEW_GOOD = {kind: GOOD[kind] for kind in FEW}


def wrap(model: nn.Module, line: Any, name: str = "blocks") -> list[Callable[[], SavedReport]]:
    """Put a wrapper around each module of the list ``name``; their reports."""
    parts = model.get_submodule(name)
    for key, part in list(parts.named_children()):
        setattr(parts, key, dh.SaveWith(part, line))
    return [part.report for part in parts.children()]


def run(make: Make, engine: Engine, train: Train, how: str, line: Any, patterns: Any = "blocks.*") -> Found:
    """Train what ``make`` makes under ``engine``, attached to in the way of ``how`` unless there is no ``line``."""
    torch.manual_seed(0)
    model = make()
    reports: list[Callable[[], SavedReport]] = []
    if line is not None and how == "wrappers":
        reports = wrap(model, line)
    elif line is not None and how == "before":
        reports = [dh.save_activations(model, patterns, line).report]
    taken = engine(model)
    if line is not None and how == "after":
        reports = [dh.save_activations(taken, patterns, line).report]
    numbers = train(taken)
    return Found(numbers, sum((report() for report in reports), SavedReport()))


def prove(
    make: Make,
    engine: Engine,
    train: Train,
    how: str,
    folder: str,
    plain: Make | None = None,
    plain_train: Train | None = None,
    once: bool = True,
    kinds: Sequence[str] = KINDS,
    patterns: Any = "blocks.*",
) -> dict[str, Proof]:
    """Every pipeline against none on this engine, and against the same pipeline on one plain process."""
    truth = run(make, engine, train, how, None)
    one = run(plain or make, _as_it_is, plain_train or train, how, stores(folder)[EVERY], patterns).report
    found = {}
    for kind in kinds:
        numbers, report = run(make, engine, train, how, stores(folder)[kind], patterns)
        found[kind] = Proof(
            identical(numbers, truth.numbers),
            report.loaded + report.kept_by.get("in place", 0) > 100_000,
            report.held,
            kind != EVERY or _activations(report, once) == _activations(one, once),
            kind == "functions" or report.kept_by["parameter"] > 0,  # the user's own functions are given weights too
        )
    return found


def fsdp2(model: Any, option: str, shape: tuple[int, ...] = (2,)) -> nn.Module:
    """Blocks in a sharded model, and for ``nested`` linear layers in sharded blocks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if option == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    if option == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    reshard: bool | int = option != "keep"
    blocks = list(model.blocks)
    for block in blocks:
        if option == "nested":
            for linear in (block.qkv, block.out, block.mlp[0], block.mlp[2]):
                fully_shard(linear, **options)
        fully_shard(block, reshard_after_forward=2 if option == "part" else reshard, **options)
    fully_shard(model, **options)
    if option == "prefetch":
        blocks[0].set_modules_to_forward_prefetch([blocks[1]])
        blocks[1].set_modules_to_backward_prefetch([blocks[0]])
    return model


def _activations(report: SavedReport, once: bool) -> int:
    """Bytes of what is stored; where an engine detaches activations, with those that one process could share."""
    return report.stored if once else report.stored + report.shared


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def numbers(model: nn.Module) -> list[torch.Tensor]:
    """This rank's part of every weight and gradient."""
    both = [tensor for p in model.parameters() for tensor in (p, p.grad)]
    return [torch.empty(0) if t is None else getattr(t, "_local_tensor", t).detach().clone() for t in both]


def trainer(rank: int, accumulate: bool = False, steps: int = 2, autocast: bool = False) -> Train:
    """A loop of ``steps`` steps on this rank's part of the data, with two batches each to ``accumulate``."""

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=autocast):
            return model(tokens(seed=seed + rank)).float().square().mean()

    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for i in range(steps):
            torch.manual_seed(i)
            if accumulate:
                with unsynced(model):
                    loss(model, 100 + 10 * i).backward()
            loss(model, 10 * i).backward()
            optimizer.step()
            found += numbers(model)
            optimizer.zero_grad()
        return found

    return train


def alive(model: nn.Module, call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of the weights that the linear layers had in forward, then; and those still there before backward."""
    seen: dict[int, tuple[StorageRef, int]] = {}

    def look(module: nn.Module, _: Any) -> None:
        storage = module.weight.untyped_storage()
        seen[storage._cdata] = (StorageRef(storage), storage.nbytes())

    hooks = [part.register_forward_pre_hook(look) for part in model.modules() if isinstance(part, nn.Linear)]
    loss = call()
    gc.collect()
    storages = [ref.get() for ref, _ in seen.values()]
    found = sum(nbytes for _, nbytes in seen.values()), sum(s.nbytes() for s in storages if s is not None)
    del storages
    loss.backward()
    for hook in hooks:
        hook.remove()
    return found


def alive_with_and_without(make: Make, engine: Engine, how: str, line: Any, rank: int) -> list[tuple[int, int]]:
    """:func:`alive` without hooks and with them."""
    found = []
    for each in (None, line):

        def train(taken: Any) -> list[torch.Tensor]:
            found.append(alive(taken, lambda: taken(tokens(seed=rank)).float().square().mean()))
            return []

        run(make, engine, train, how, each)
    return found
