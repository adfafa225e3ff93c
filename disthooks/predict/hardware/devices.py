"""What is known of common GPUs: memory, speed of computation and of memory, and the link to the host.

``device_named("h100")`` finds one by any usual way of writing its name. The figures are the vendors', so they are upper
bounds; :class:`Device` has the share of them that programs reach.
"""

# [Note: where the figures come from]
# - Operations a second are dense: half of a figure "with sparsity". For GeForce cards they are those with accumulation
#   in fp32, which torch uses. `source` names the vendor's document for each device.
# - The memory is the smallest `total_memory` that torch was seen to report for the device ("GPU 0 has a total capacity
#   of ..." in public reports, `_CudaDeviceProperties(...)` in public logs). It depends on the driver, by up to 1%, and
#   is less than the number on the box: the driver keeps some, and so does ECC on cards with GDDR. No report that names
#   the card was found for A100-80GB, GH200 and L4: their figures may be wrong by more.
# - A CUDA context takes about 300 MB with lazy loading of kernels (CUDA 11.7 or later), more as kernels are loaded, and
#   took over 1 GB before (pytorch/pytorch#107667, #28394). It depends on driver, device and libraries, so half a GiB is
#   an approximation, and nothing better can be known without the device.
# - torch gives cuBLAS a workspace for each thread that multiplies matrices, and backward runs in a thread of its own.
#   It comes from torch's allocator, so `max_memory_allocated` counts it. Sizes: `parseChosenWorkspaceSize` in
#   aten/src/ATen/cuda/CublasHandlePool.cpp, without CUBLAS_WORKSPACE_CONFIG.
# - The compute capability is that of NVIDIA's list (developer.nvidia.com/cuda-gpus). For AMD it is the number that
#   torch says on ROCm: 9.4 for gfx942, 9.0 for gfx90a.
#
# [Note: what is reached]
# - Matrix products: the best product of bfloat16 matrices that stas00/ml-engineering (compute/accelerator, "Maximum
#   Achievable Matmul FLOPS", read in August 2026) found with torch: 86.9% on A100 SXM, 81.1% on A100 PCIe, 80.3% on
#   H100 SXM, 83.8% on GH200, 77.6% on B200, 51.4% on MI300X. For a device that is not there: 75%, which torch's own
#   estimator takes for all (`flops_to_ns` in torch/utils/_runtime_estimation.py).
# - Memory: 85%. This is an assumption. Nothing in this project measured it.
# - The link: 80%. One copy engine between page-locked memory and an A100 moved 24.8 GB/s of PCIe 4's 31.5 (79%; a
#   report in NVIDIA's developer forum, topic 352186), and an example of NVIDIA's nvbandwidth shows 55.6 GB/s of PCIe
#   5's 63 (88%).

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from typing import Any

from disthooks.errors import UsageError

MiB = 1 << 20
#: The compute capability of "cuda" without a name: Hopper's, which most large models train on.
CAPABILITY = (9, 0)
#: Bytes of a CUDA context, roughly; see [Note: where the figures come from].
CONTEXT = 512 * MiB
#: Bytes of cuBLAS's workspace for each thread, before Hopper; and from Hopper on.
WORKSPACE, WORKSPACE_HOPPER = 2 * 4096 * 1024 + 8 * 16 * 1024, 8 * 4096 * 1024
#: Bytes a second in each direction of 16 lanes of PCIe, by generation.
PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63e9}


@dataclasses.dataclass(frozen=True)
class Device:
    """What a prediction needs to know of a device.

    Attributes:
        kind: the type of its torch device: ``"cuda"`` (AMD's too) or ``"cpu"``.
        memory_bytes: the memory that torch reports as total.
        fp32, tf32, bf16, fp16, fp8: the vendor's dense peak in operations a second, a multiplication and an addition
            counting as two; None if the device has no units for this type.
        bandwidth: bytes a second from and to the device's own memory.
        to_device, to_host: bytes a second of the link to the host's memory, each way.
        multiprocessors: the number of streaming multiprocessors, or of AMD's compute units.
        has_cudnn: whether cuDNN is there: on each NVIDIA GPU, and on no other device.
        context_bytes: memory that the CUDA context takes: approximate.
        workspace_bytes: memory of cuBLAS's workspace for each thread that multiplies matrices.
        matmul_efficiency, memory_efficiency, link_efficiency: the share of a peak that programs reach; see
            [Note: what is reached].
    """

    name: str
    kind: str
    memory_bytes: int
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float | None
    fp8: float | None
    bandwidth: float
    to_device: float
    to_host: float
    link: str
    multiprocessors: int = 0
    capability: tuple[int, int] = (0, 0)
    has_cudnn: bool = False
    context_bytes: int = CONTEXT
    workspace_bytes: int = WORKSPACE
    matmul_efficiency: float = 0.75
    memory_efficiency: float = 0.85
    link_efficiency: float = 0.80
    source: str = ""

    @property
    def usable_bytes(self) -> int:
        """The memory that is left for torch's allocator beside the CUDA context: approximate."""
        return max(0, self.memory_bytes - self.context_bytes)

    def offload_seconds(self, nbytes: int) -> float:
        """Seconds of link that ``nbytes`` bytes need to the host's memory and back, if nothing else uses it."""
        return (nbytes / self.to_host + nbytes / self.to_device) / self.link_efficiency


def _gpu(
    name: str,
    mib: int,
    multiprocessors: int,
    capability: float,
    peaks: tuple[float, float | None, float | None, float | None, float | None],
    gb_per_s: float,
    pcie: int,
    source: str,
    **others: Any,
) -> Device:
    fp32, tf32, bf16, fp16, fp8 = (None if peak is None else peak * 1e12 for peak in peaks)
    link: dict[str, Any] = {"to_device": PCIE[pcie], "to_host": PCIE[pcie], "link": f"PCIe {pcie} x16"}
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=mib * MiB,
        fp32=fp32 or 0.0,
        tf32=tf32,
        bf16=bf16,
        fp16=fp16,
        fp8=fp8,
        bandwidth=gb_per_s * 1e9,
        multiprocessors=multiprocessors,
        capability=(int(capability), round(10 * capability) % 10),
        has_cudnn=source.startswith("NVIDIA"),
        source=source,
        **(link | others),
    )


_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"

# fmt: off
#: The table. If a name fits several rows, the first one is meant.
DEVICES: tuple[Device, ...] = (
    #    name             MiB     SMs  CC    fp32   tf32   bf16   fp16   fp8     GB/s  PCIe  source
    _gpu("H100-SXM-80GB", 81082, 132, 9.0, (66.9, 494.7, 989.4, 989.4, 1978.9), 3350, 5, _H100,
         matmul_efficiency=0.803, workspace_bytes=WORKSPACE_HOPPER),
    _gpu("H100-PCIe-80GB", 81008, 114, 9.0, (51.2, 378.0, 756.0, 756.0, 1513.0), 2000, 5, _H100,
         workspace_bytes=WORKSPACE_HOPPER),
    _gpu("H200-SXM-141GB", 143156, 132, 9.0, (66.9, 494.7, 989.4, 989.4, 1978.9), 4800, 5,
         "NVIDIA H200 Tensor Core GPU datasheet",
         matmul_efficiency=0.803, workspace_bytes=WORKSPACE_HOPPER),
    _gpu("B200-SXM-180GB", 182631, 148, 10.0, (75.0, 1100.0, 2250.0, 2250.0, 4500.0), 7700, 5,
         "NVIDIA HGX B200 specifications, per GPU",
         matmul_efficiency=0.776, workspace_bytes=WORKSPACE_HOPPER),
    _gpu("GH200-96GB", 96768, 132, 9.0, (66.9, 494.7, 989.4, 989.4, 1978.9), 4000, 5,
         "NVIDIA GH200 Grace Hopper Superchip datasheet", to_device=450e9, to_host=450e9, link="NVLink-C2C",
         matmul_efficiency=0.838, workspace_bytes=WORKSPACE_HOPPER),
    _gpu("A100-SXM-80GB", 81039, 108, 8.0, (19.5, 156.0, 312.0, 312.0, None), 2039, 4, _A100,
         matmul_efficiency=0.869),
    _gpu("A100-SXM-40GB", 40441, 108, 8.0, (19.5, 156.0, 312.0, 312.0, None), 1555, 4, _A100,
         matmul_efficiency=0.869),
    _gpu("A100-PCIe-80GB", 81039, 108, 8.0, (19.5, 156.0, 312.0, 312.0, None), 1935, 4, _A100, matmul_efficiency=0.811),
    _gpu("A100-PCIe-40GB", 40326, 108, 8.0, (19.5, 156.0, 312.0, 312.0, None), 1555, 4, _A100, matmul_efficiency=0.811),
    _gpu("L40S-48GB", 45402, 142, 8.9, (91.6, 183.0, 362.0, 362.0, 733.0), 864, 4, "NVIDIA L40S datasheet"),
    _gpu("L4-24GB", 22559, 58, 8.9, (30.3, 60.0, 121.0, 121.0, 242.5), 300, 4, "NVIDIA L4 Tensor Core GPU datasheet"),
    _gpu("A10G-24GB", 22587, 80, 8.6, (35.0, 35.0, 70.0, 70.0, None), 600, 4, "NVIDIA A10G datasheet (AWS G5)"),
    _gpu("V100-SXM-16GB", 16130, 80, 7.0, (15.7, None, None, 125.0, None), 900, 3, _V100),
    _gpu("V100-SXM-32GB", 32501, 80, 7.0, (15.7, None, None, 125.0, None), 900, 3, _V100),
    _gpu("T4-16GB", 14909, 40, 7.5, (8.1, None, None, 65.0, None), 320, 3, "NVIDIA T4 Tensor Core GPU datasheet"),
    _gpu("RTX-5090-32GB", 32122, 170, 12.0, (104.8, 104.8, 209.5, 209.5, 419.0), 1792, 5,
         "NVIDIA RTX Blackwell GPU Architecture whitepaper", workspace_bytes=WORKSPACE_HOPPER),
    _gpu("RTX-4090-24GB", 24217, 128, 8.9, (82.6, 82.6, 165.2, 165.2, 330.3), 1008, 4,
         "NVIDIA Ada GPU Architecture whitepaper"),
    _gpu("RTX-3090-24GB", 24259, 82, 8.6, (35.6, 35.6, 71.2, 71.2, None), 936, 4,
         "NVIDIA Ampere GA102 GPU Architecture whitepaper"),
    _gpu("RTX-6000-Ada-48GB", 48622, 142, 8.9, (91.1, 182.1, 364.2, 364.2, 728.5), 960, 4,
         "NVIDIA RTX 6000 Ada Generation datasheet"),
    _gpu("RTX-A6000-48GB", 48676, 84, 8.6, (38.7, 77.4, 154.8, 154.8, None), 768, 4,
         "NVIDIA Ampere GA102 GPU Architecture whitepaper"),
    _gpu("MI300X-192GB", 196592, 304, 9.4, (163.4, 653.7, 1307.4, 1307.4, 2614.9), 5300, 5,
         "AMD Instinct MI300X data sheet", matmul_efficiency=0.514, workspace_bytes=128 * MiB),
    _gpu("MI250X-64GB", 65520, 110, 9.0, (23.95, None, 191.5, 191.5, None), 1638.4, 4,
         "AMD Instinct MI250X data sheet, one of its two dies, which torch sees as a device",
         workspace_bytes=32 * MiB),
)
# fmt: on

#: What names may have besides what distinguishes devices.
_NOISE = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|generation|gpu|hbm\d?e?|gddr\d?x?|480 ?gb|gi?b\b")


def _words(name: str) -> list[str]:
    """The letters and numbers of ``name`` that distinguish devices.

    >>> _words("NVIDIA A100-SXM4-80GB")
    ['a', '100', 'sxm', '80']
    """
    text = re.sub(r"(sxm|pcie)\d", r"\1", name.lower())
    return re.findall(r"[a-z]+|\d+", _NOISE.sub(" ", text))


_TABLE = tuple((device, frozenset(_words(device.name))) for device in DEVICES)


def device_named(name: str) -> Device:
    """Find a device by any usual way of writing its name, or ``"cpu"``.

    A name that fits several devices means the first of them in :data:`DEVICES`: the one that is most used for training.
    The CPU's speed is a rough guess from its number of cores.

    >>> [device_named(name).name for name in ("h100", "a100 40", "Tesla T4", "rtx4090")]
    ['H100-SXM-80GB', 'A100-SXM-40GB', 'T4-16GB', 'RTX-4090-24GB']
    """
    if name.strip().lower() == "cpu":
        return _cpu()
    words = set(_words(name))
    for device, known in _TABLE:
        if words <= known and any(word.isdigit() for word in words):
            return device
    near = difflib.get_close_matches("".join(_words(name)), _NEAR, n=3, cutoff=0.5)
    meant = f"did you mean {', '.join(_NEAR[each] for each in near)}? " if near else ""
    everything = ", ".join(["cpu", *(device.name for device in DEVICES)])
    raise UsageError(f"there is no device {name!r} in the table: {meant}It has {everything}")


#: The first device of each sort, by its name without the memory.
_NEAR = {"".join(_words(device.name)[:-1]): device.name for device in reversed(DEVICES)}


def _cpu() -> Device:
    """The CPU of this machine: 32 operations a cycle of each core (AVX2) at 2.5 GHz, 10 GB/s of memory for each core.

    These are guesses within a factor of four. A prediction for a CPU is about bytes.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows
        memory = 0
    peak, bandwidth = cores * 32 * 2.5e9, cores * 10e9
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=memory,
        fp32=peak,
        tf32=None,
        bf16=None,
        fp16=None,
        fp8=None,
        bandwidth=bandwidth,
        to_device=bandwidth / 2,  # a copy within memory reads and writes
        to_host=bandwidth / 2,
        link="memory",
        multiprocessors=cores,
        context_bytes=0,
        workspace_bytes=0,
        source="guessed from the number of cores",
    )
