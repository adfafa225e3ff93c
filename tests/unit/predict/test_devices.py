"""The table of devices: names as people and drivers write them, figures that fit each other, and measured ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from disthooks.errors import UsageError
from disthooks.predict.explain import explain
from disthooks.predict.hardware.devices import DEVICES, PCIE, device_named

GiB = 1 << 30


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "H100-SXM-80GB"),
        ("h100sxm", "H100-SXM-80GB"),
        ("H100 PCIe", "H100-PCIe-80GB"),
        ("a100 80", "A100-SXM-80GB"),
        ("a100-40gb", "A100-SXM-40GB"),
        ("a100 pcie 40 GB", "A100-PCIe-40GB"),
        ("v100", "V100-SXM-16GB"),
        ("4090", "RTX-4090-24GB"),
        ("rtx 6000 ada", "RTX-6000-Ada-48GB"),
        ("L40S", "L40S-48GB"),
    ],
)
def test_a_device_is_found_by_what_people_write(name: str, found: str) -> None:
    assert device_named(name).name == found


@pytest.mark.parametrize(
    ("name", "mib", "multiprocessors", "found"),
    [  # what torch.cuda.get_device_properties said in public logs
        ("NVIDIA H100 80GB HBM3", 81082, 132, "H100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", 81090, 132, "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", 81008, 114, "H100-PCIe-80GB"),
        ("NVIDIA H200", 143156, 132, "H200-SXM-141GB"),
        ("NVIDIA B200", 182631, 148, "B200-SXM-180GB"),
        ("A100-SXM4-40GB", 40536, 108, "A100-SXM-40GB"),
        ("NVIDIA A100-PCIE-40GB", 40326, 108, "A100-PCIe-40GB"),
        ("NVIDIA L40S", 45589, 142, "L40S-48GB"),
        ("NVIDIA A10G", 22587, 80, "A10G-24GB"),
        ("Tesla V100-SXM2-16GB", 16160, 80, "V100-SXM-16GB"),
        ("Tesla T4", 15109, 40, "T4-16GB"),
        ("GeForce RTX 3090", 24268, 82, "RTX-3090-24GB"),
        ("NVIDIA GeForce RTX 4090", 24563, 128, "RTX-4090-24GB"),
        ("NVIDIA RTX A6000", 48676, 84, "RTX-A6000-48GB"),
        ("NVIDIA RTX 6000 Ada Generation", 48622, 142, "RTX-6000-Ada-48GB"),
        ("AMD Instinct MI300X", 196592, 304, "MI300X-192GB"),
        ("AMD Instinct MI250X", 65520, 110, "MI250X-64GB"),
    ],
)
def test_a_device_is_found_by_what_torch_calls_it(name: str, mib: int, multiprocessors: int, found: str) -> None:
    device = device_named(name)
    assert (device.name, device.multiprocessors) == (found, multiprocessors)
    assert mib * 0.97 <= device.memory_bytes >> 20 <= mib  # never more than a driver was seen to report


@pytest.mark.parametrize("name", [device.name for device in DEVICES])
def test_each_device_has_figures_that_fit_each_other(name: str) -> None:
    device = device_named(name)
    assert device.name == name
    said = float(name.rpartition("-")[2].removesuffix("GB"))
    assert 0.86 * said * 1e9 < device.memory_bytes < said * 1.02 * GiB
    assert device.usable_bytes < device.memory_bytes
    assert device.source.startswith(("NVIDIA ", "AMD "))
    assert device.kind == "cuda"
    peaks = [peak for peak in (device.fp32, device.tf32, device.fp16, device.fp8) if peak is not None]
    assert peaks == sorted(peaks)  # the shorter a type is, the faster
    assert device.bf16 in (None, device.fp16)
    # Tensor cores have had bfloat16 and TF32 since 8.0, and fp8 since 8.9.
    assert (device.bf16 is not None) == (device.capability >= (8, 0))
    assert (device.fp8 is not None) == (device.capability >= (8, 9)) or name == "MI250X-64GB"
    assert device.has_cudnn == device.source.startswith("NVIDIA ")
    assert 30 < (device.bf16 or device.fp16 or 0) / device.bandwidth < 450  # operations for each byte
    assert device.to_device == device.to_host <= device.bandwidth
    assert device.link == "NVLink-C2C" or device.to_host in PCIE.values()
    for share in (device.matmul_efficiency, device.memory_efficiency, device.link_efficiency):
        assert 0.5 < share < 1


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cuda", "cudnn"),  # without a name: as an H100
        ("h100", "cudnn"),
        ("a100", "flash"),
        ("4090", "flash"),
        ("mi300x", "flash"),
        ("v100", "efficient"),  # flash needs 8.0
    ],
)
def test_attention_is_that_of_the_named_device(device: str, backend: str) -> None:
    x = torch.empty(1, 2, 32, 64, dtype=torch.float16, requires_grad=True)
    said = explain(Attention(), x, device=device)
    assert f"aten._scaled_dot_product_{backend}_attention" in said.by_operator


def test_a_name_that_is_not_there_is_an_error_with_near_names() -> None:
    with pytest.raises(UsageError, match=r"there is no device 'h101' in the table: did you mean .*H100-SXM-80GB"):
        device_named("h101")
    with pytest.raises(UsageError, match="It has cpu, H100-SXM-80GB"):
        device_named("abacus")
    for name in ("", "rtx", "sxm", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 NVL"):
        with pytest.raises(UsageError):
            device_named(name)


def test_the_cpu_is_this_machine() -> None:
    cpu = device_named("CPU")
    assert (cpu.kind, cpu.context_bytes, cpu.usable_bytes) == ("cpu", 0, cpu.memory_bytes)
    assert cpu.memory_bytes > GiB
    assert cpu.fp32 > 1e9


def test_offloading_takes_the_link_both_ways() -> None:
    device = dataclasses.replace(device_named("a100"), to_host=20e9, to_device=10e9, link_efficiency=0.5)
    assert device.offload_seconds(10**10) == 2 * (0.5 + 1.0)
