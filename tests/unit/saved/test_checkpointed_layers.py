"""``fit`` on the CPU: what is free there, and which checkpoints it may switch off.

Those are the ones of layers whose second computation has no other effect.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.utils.parametrizations import spectral_norm

import disthooks as dh
from disthooks import memory
from disthooks.saved.checkpointed_layers import CheckpointedLayers
from disthooks.saved.stores.host import container_memory, node_memory

needs_peak = pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
WIDE, ROWS = 64, 8


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(0.5), nn.GELU())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE))


def frozen() -> nn.Module:
    layer = normed()
    layer[1].track_running_stats = False  # the buffers stay as they are
    layer[1].running_mean = layer[1].running_var = None
    return layer


class Counting(nn.Module):
    """Puts a new tensor into a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDE, WIDE)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.inner(x)


class Joined(nn.Linear):
    """Adds up its output over the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        dist.all_reduce(y.detach())
        return y


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def run(model: nn.Module) -> None:
    model(torch.ones(ROWS, WIDE)).sum().backward()


LAYERS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "plain": (plain, True),
    "a norm without statistics": (frozen, True),
    "a batch norm": (normed, False),
    "a spectral norm": (lambda: spectral_norm(nn.Linear(WIDE, WIDE)), False),
    "a new buffer": (Counting, False),
    "a collective": (lambda: Joined(WIDE, WIDE), False),
}


def test_a_backend_that_does_not_count_switches_nothing() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = nn.Sequential(CheckpointWrapper(plain()))
        layers = CheckpointedLayers(model, [""])
        run(model)
    finally:
        dist.destroy_process_group()
    assert len(layers) == 0


def test_a_compiled_layer_keeps_its_checkpoint() -> None:
    model = nn.Sequential(CheckpointWrapper(plain()), CheckpointWrapper(plain()))
    model[0].compile(backend="eager")
    layers = CheckpointedLayers(model, [""])
    run(model)
    assert len(layers) == 1


def trained(make: Callable[[], nn.Module], folder: pathlib.Path | None) -> tuple[nn.Module, int]:
    """A model of eight layers after six steps, with a budget that has room for all if ``folder`` is given."""
    torch.manual_seed(0)
    model = nn.Sequential(*(CheckpointWrapper(make()) for _ in range(8)))
    fitted = None if folder is None else dh.fit(model, memory.resident() + (256 << 20), dh.OnDisk(folder))
    before = [layer.checkpoint_fn for layer in model]
    run(model.eval())  # only a forward in training tells what a layer leaves behind
    model.train()
    for _ in range(6):
        run(model)
        assert [layer.checkpoint_fn for layer in model] == before, "between forwards the model is the user's"
        if make is plain:  # torch does not copy a wrapper around a parametrized module
            assert [layer.checkpoint_fn.func for layer in copy.deepcopy(model)] == [each.func for each in before]
    return model, fitted.report().checkpoints_off if fitted else 0


@needs_peak
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("case", LAYERS)
def test_no_weight_gradient_or_buffer_depends_on_the_budget(case: str, tmp_path: pathlib.Path) -> None:
    """Only the checkpoint of a layer that leaves nothing behind is switched off."""
    make, is_free = LAYERS[case]
    memory.release_promptly()
    (one, _), (two, found) = trained(make, None), trained(make, tmp_path)
    assert found == 8 * is_free
    assert all(torch.equal(*pair) for pair in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


@needs_peak
def test_after_an_error_in_forward_the_model_is_as_it_was(tmp_path: pathlib.Path) -> None:
    memory.release_promptly()
    model = nn.Sequential(*(CheckpointWrapper(plain()) for _ in range(4)))
    before = [layer.checkpoint_fn for layer in model]
    fitted = dh.fit(model, memory.resident() + (256 << 20), dh.OnDisk(tmp_path))
    for _ in range(5):
        run(model)
    seen = []

    def fails(*_: object) -> None:
        seen.extend(layer.checkpoint_fn for layer in model)
        raise KeyError("of the user")

    handle = model[3].register_forward_pre_hook(fails)
    with pytest.raises(KeyError):
        run(model)
    handle.remove()
    assert not set(seen) & set(before), "in forward all were off"
    assert [layer.checkpoint_fn for layer in model] == before
    fitted.remove()
    run(model)


@needs_peak
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
