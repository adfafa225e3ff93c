"""GPUDirect Storage: the reasons why there is none, and the order of what goes past the streams.

Where there is a GPU with kvikio, tests/gpu/test_disk_gpu.py has the real one.
"""

from __future__ import annotations

import copy
import gc
import os
import pathlib
import pickle
import sys

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores import gpu_direct
from disthooks.saved.stores.gpu_direct import GpuDirectBackend
from disthooks.saved.stores.scratch_file import ScratchFile
from disthooks.testing import BackendTests
from tests.support.sim import kvikio_like, simulated

ALL = dh.AtLeast(0)


def chain(x: torch.Tensor, length: int = 6) -> torch.Tensor:
    for _ in range(length):
        x = x.sin()
    return x


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> object:
    """The stand-in, for the simulated device."""
    if device.type != "sim":
        pytest.skip("moves the memory of the simulated device alone")
    monkeypatch.setattr(gpu_direct, "_kvikio", lambda: (kvikio_like, ""))
    monkeypatch.setattr(gpu_direct, "_KINDS", ("sim",))
    kvikio_like.moved.clear()
    yield kvikio_like
    kvikio_like.fails.clear()


def test_why_there_is_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, or without kvikio: a reason, and host memory instead."""
    if not torch.cuda.is_available():
        with pytest.raises(StoreError, match="gpu_direct=True, but there is no NVIDIA GPU"):
            dh.OnDisk(tmp_path, gpu_direct=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(StoreError, match=r"kvikio cannot be imported .* install kvikio-cu12"):
        dh.OnDisk(tmp_path, gpu_direct=True)
    with pytest.raises(StoreError, match="gpu_direct=True, but checksum=True reads every byte on the host"):
        dh.OnDisk(tmp_path, gpu_direct=True, checksum=True)
    with pytest.raises(StoreError, match="written through the page cache: direct=False"):
        dh.OnDisk(tmp_path, gpu_direct=True, direct=False)
    with pytest.raises(UsageError, match="gpu_direct must be"):
        dh.OnDisk(tmp_path, gpu_direct="yes")
    with pytest.raises(UsageError, match="gpu_direct must be"):
        dh.OnDisk(tmp_path, gpu_direct=1)


def test_the_reason_is_in_the_report(tmp_path: pathlib.Path, device: torch.device) -> None:
    """Looked for when the first tensor of a device comes."""
    store = dh.OnDisk(tmp_path, gpu_direct="auto", checksum=True)
    assert store.report()[0].why_staged == ""
    tensor = torch.randn(1 << 18).to(device)
    ticket = store.put(tensor)
    store.wait()
    assert torch.equal(store.get(ticket).cpu(), tensor.cpu())
    assert "through host memory: checksum=True" in str(store.report()[0])
    store.drop(ticket)


def test_copies_and_pickles(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path, gpu_direct="auto")
    for twin in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert twin == store
        assert twin.gpu_direct == "auto"


def test_all_of_kvikio_is_imported(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is laid out so (26.10): whoever imports it has its files, but neither its driver nor its defaults."""
    package = tmp_path / "kvikio"
    package.mkdir()
    (package / "__init__.py").write_text("class CompatMode:\n    OFF = 0\n")
    (package / "cufile_driver.py").write_text("def get(name):\n    return name == 'is_gds_available'\n")
    (package / "defaults.py").write_text("def set(*config):\n    pass\n")
    for name in ("kvikio", "kvikio.cufile_driver", "kvikio.defaults"):
        monkeypatch.setitem(sys.modules, name, None)  # to have them as they were afterwards
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    found, why = gpu_direct._kvikio()
    assert why == ""
    assert callable(found.defaults.set)


def test_past_the_host(kvikio: object, tmp_path: pathlib.Path, device: torch.device) -> None:
    store = dh.OnDisk(tmp_path, gpu_direct=True, in_flight="8 MiB")
    numel = 1 << 18  # 1 MiB each
    for seed in range(6):
        simulated.delays(300e-6, seed)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
        (expected,) = torch.autograd.grad(chain(x).sum(), x)
        with simulated.counted() as counts:
            with dh.saving(ALL, store):
                y = chain(x)
            store.wait()
            (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad.cpu(), expected.cpu())
        assert counts["to_host_async_bytes"] < numel  # the tensors went another way
        del y
    probe = [("pwrite", 1 << 20), ("pread", 1 << 20)]
    assert kvikio_like.moved[:2] == probe
    assert len(kvikio_like.moved) == 2 + 6 * 12
    gc.collect()
    assert store.budget.held == 0


def test_others_go_through_the_host(kvikio: object, tmp_path: pathlib.Path, device: torch.device) -> None:
    """No whole pages, or too small; beside those that do."""
    store = dh.OnDisk(tmp_path, gpu_direct=True)
    before = len(kvikio_like.moved)
    tensors = [torch.randn(numel).to(device) for numel in ((1 << 18) + 1, 1000, 1 << 18)]
    tickets = [store.put(tensor) for tensor in tensors]
    store.wait()
    for tensor, ticket in zip(tensors, tickets, strict=True):
        assert torch.equal(store.get(ticket).cpu(), tensor.cpu())
        store.drop(ticket)
    assert kvikio_like.moved[before:] == [("pwrite", 1 << 20), ("pread", 1 << 20)]


def test_a_write_that_fails(kvikio: object, tmp_path: pathlib.Path, device: torch.device) -> None:
    """It is said once, and the tensor is on the device still."""
    store, tensor = dh.OnDisk(tmp_path, gpu_direct=True), torch.randn(1 << 18).to(device)
    kvikio_like.fails.append(OSError(28, "No space left on device"))
    ticket = store.put(tensor)
    with pytest.raises(StoreError, match="1048576 bytes could not be written by GPUDirect Storage: No space left"):
        store.wait()
    assert store.get(ticket).data_ptr() == tensor.data_ptr()
    store.drop(ticket)
    assert store.budget.held == 0


def test_memory_that_the_device_is_not_done_with(kvikio: object, tmp_path: pathlib.Path, device: torch.device) -> None:
    """What is read into was another tensor's a moment ago, and a copy into that is still to come."""
    store, numel = dh.OnDisk(tmp_path, gpu_direct=True), 1 << 18
    zeros = torch.zeros(numel).pin_memory()
    for seed in range(20):
        tensor = torch.randn(numel).to(device)
        truth, ticket = tensor.cpu(), store.put(tensor)
        store.wait()
        del tensor
        simulated.delays(5e-3, seed)
        another = torch.empty(numel, device=device).copy_(zeros, non_blocking=True)
        del another
        assert torch.equal(store.get(ticket).cpu(), truth)
        store.drop(ticket)


class TestBackend(BackendTests):
    """The conformance tests of backends, with memory of the device."""

    test_law_9_forks = None  # a fork cannot use the device at all

    @pytest.fixture
    def backend(self, kvikio: object, tmp_path: pathlib.Path, device: torch.device) -> GpuDirectBackend:
        self.device = device
        file = ScratchFile(str(tmp_path), "auto")
        direct, why = gpu_direct.opened([file], checksum=False)
        if direct is None:
            pytest.skip(why)
        return GpuDirectBackend(direct, file, capacity=2 << 20)

    def lose(self, backend: GpuDirectBackend) -> None:
        os.ftruncate(backend.file.fileno(), 0)

    def memory(self, backend: object, data: bytes) -> torch.Tensor:
        memory = torch.tensor(list(data), dtype=torch.uint8, device=self.device)
        torch.accelerator.synchronize()  # kvikio waits for no stream
        return memory

    def data(self, memory: torch.Tensor) -> bytes:
        return bytes(memory.cpu().tolist())
