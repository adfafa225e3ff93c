"""What is refused while a CUDA graph is captured, and what is left where the compiler's graphs want it.

The decisions alone: torch cannot be made to capture without a GPU. ``tests/gpu/test_graphs_gpu.py`` captures.
"""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import _torch
from disthooks._torch import in_graph_memory
from disthooks.errors import AttachError


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "capturing", lambda: True)


def test_a_build_for_cuda_without_a_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(_torch, "_HAS_GRAPHS", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", ask)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not _torch.capturing()


@pytest.mark.usefixtures("capturing")
def test_hooks_refuse_to_open_in_a_capture_and_name_the_module() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.ones(64, 64)
    saving = dh.save_activations(model, "0", dh.OnCpu())
    with pytest.raises(AttachError, match=r"'0'.*CUDA graph is being captured.*remove\(\) the hooks"):
        model(x)
    with pytest.raises(AttachError, match=r"a saving\(\.\.\.\) block.*replays"), dh.saving(dh.OnCpu()):
        pass
    with torch.no_grad():
        assert model(x).shape == x.shape  # nothing is saved: inference may be captured
    saving.remove()
    model(x).sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_rules_and_statistics_refuse_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(2, 3)).sum().backward()
    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]) as watch:
        with monkeypatch.context() as patch:
            patch.setattr(_torch, "capturing", lambda: True)
            with pytest.raises(AttachError, match=r"optimizer's step: a CUDA graph.*outside of the graph"):
                optimizer.step()
        assert torch.equal(model.weight, before)
        assert watch.steps == 0
        optimizer.step()
        assert watch.steps == 1


@pytest.fixture
def node() -> Iterator[types.SimpleNamespace]:
    """What the compiler's graphs gave last on the device without a number, as its own manager would say."""
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    given = types.SimpleNamespace(tensors=[])
    given._is_cuda_graph_recorded_tensor = lambda t: any(
        t.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in given.tensors
    )
    container = trees.get_container(0)
    container.tree_manager = types.SimpleNamespace(current_node=given)
    yield given
    container.tree_manager = None


def test_memory_of_the_compilers_graphs_is_recognised_and_what_cannot_be_told_is_left_alone(
    node: types.SimpleNamespace,
) -> None:
    from torch._inductor import cudagraph_trees

    inside, outside = torch.ones(3), torch.ones(3)
    node.tensors.append(inside)
    assert [in_graph_memory(each) for each in (inside, inside[1:], outside)] == [True, True, False]
    container = cudagraph_trees.get_container(0)
    manager, container.tree_manager = container.tree_manager, None
    assert not in_graph_memory(inside), "nobody has graphs"
    container.tree_manager = types.SimpleNamespace(current_node=None)
    assert not in_graph_memory(inside)
    container.tree_manager = manager
    del node._is_cuda_graph_recorded_tensor
    assert in_graph_memory(outside)


def test_torch_still_tells_it_so() -> None:
    """The two classes whose private method is asked, and what they promise each other."""
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    for kind in (trees.CUDAGraphNode, trees.CUDAWarmupNode):
        assert callable(kind._is_cuda_graph_recorded_tensor)
    assert isinstance(trees.CUDAGraphTreeManager.current_node, property)
