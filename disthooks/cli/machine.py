"""What this machine is: facts, in plain values that JSON can hold."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import resource
import shutil
import sys
import time
from typing import Any

PACKAGES = (
    "accelerate",
    "deepspeed",
    "kvikio-cu12",
    "kvikio-cu13",
    "lightning",
    "lz4",
    "mlflow-skinny",
    "numpy",
    "peft",
    "pydantic",
    "pyyaml",
    "ray",
    "rich",
    "tensorboard",
    "torchtitan",
    "transformers",
    "triton",
    "trl",
    "typer",
    "wandb",
    "zstandard",
)
#: What launchers and schedulers tell their processes.
_TOLD = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|DISTHOOKS_\w+"
    r"|PET_\w+|TORCHELASTIC_\w+|SLURM_(PROCID|LOCALID|NTASKS|NNODES|NODEID|JOB_ID|JOB_NODELIST|CPUS_PER_TASK)"
    r"|OMPI_COMM_WORLD_(RANK|SIZE)|PMI_(RANK|SIZE)|ACCELERATE_\w+|FSDP_VERSION|CUDA_VISIBLE_DEVICES|NCCL_SOCKET_IFNAME"
    r"|GLOO_SOCKET_IFNAME|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
)


def versions() -> dict[str, str | None]:
    """Of disthooks and what it works with; None for what is not installed."""
    from disthooks import __version__

    found: dict[str, str | None] = {"disthooks": __version__, "python": platform.python_version()}
    return found | {name: _version(name) for name in ("torch", *PACKAGES)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, str]:
    """What launchers and schedulers told this process."""
    return {name: value for name, value in sorted(os.environ.items()) if _TOLD.fullmatch(name)}


def rank() -> int:
    """The number of this process among those that run the same command; 0 when it is alone."""
    told = [os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")]
    return next((int(value) for value in told if value is not None and value.isdigit()), 0)


def torch_facts() -> dict[str, Any]:
    """What torch was built for and what it finds."""
    import torch
    import torch.distributed as dist

    backends = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _driver(),
        "backends": [name for name in backends if dist.is_available() and dist.is_backend_available(name)],
        "threads": torch.get_num_threads(),
        "devices": [_device(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
    }


def _device(index: int) -> dict[str, Any]:
    import torch

    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    kind = f"{about.major}.{about.minor}"
    facts = {"index": index, "name": about.name, "capability": kind, "memory_bytes": total, "free_bytes": free}
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    address = [getattr(about, name, None) for name in names]  # of later torches
    return facts | {"numa_node": numa_node(*address)}


def numa_node(domain: int | None, bus: int | None, device: int | None) -> int | None:
    """The node of the processor that a PCI device hangs on; None where there is one node, or nobody tells.

    >>> numa_node(None, None, None), numa_node(0xFFFF, 0xFF, 0x1F)
    (None, None)
    """
    if domain is None or bus is None or device is None:
        return None
    try:
        node = int(_text(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0/numa_node"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def _driver() -> str | None:
    """The version of NVIDIA's driver, as its kernel module tells it."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\s", _text("/proc/driver/nvidia/version"))
    except OSError:
        return None
    return found[1] if found else None


def _text(path: str) -> str:
    return pathlib.Path(path).read_text(errors="replace")


def cores() -> dict[str, int]:
    """Cores of the machine, and those that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"there": os.cpu_count() or 1, "usable": usable}


def memory_facts() -> dict[str, int | None]:
    """Bytes of memory, of what may be locked, and of ``/dev/shm``; None where there is no limit or nobody tells."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        shm = None
    return {
        "total_bytes": _meminfo("MemTotal"),
        "available_bytes": _meminfo("MemAvailable"),
        "limit_bytes": _group_limit(),
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "shm_bytes": shm and shm.total,
        "shm_free_bytes": shm and shm.free,
    }


def _meminfo(name: str) -> int | None:
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", _text("/proc/meminfo"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _group_limit() -> int | None:
    """What a container is held to."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(_text(path))
        except (OSError, ValueError):  # "max" is no number
            continue
        return limit if limit < 1 << 60 else None
    return None


def tools() -> dict[str, str | None]:
    """Programs that something may have to call; None for what is not there."""
    compiler = os.environ.get("CXX", "c++")
    found = {name: shutil.which(name) for name in ("mpirun", "ninja", "nvcc", "srun", "torchrun")}
    return {"c++": shutil.which(compiler) or shutil.which("g++"), **found}


def build_locks() -> list[dict[str, Any]]:
    """Locks of operators that are being built, or were when the process that built them was killed."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    found = []
    for lock in pathlib.Path(folder).expanduser().glob("**/lock"):
        with contextlib.suppress(OSError):  # it was let go of in this moment
            found.append({"path": str(lock), "age_s": round(time.time() - lock.stat().st_mtime)})
    return found


def has_infiniband() -> bool:
    """Whether there is an adapter for InfiniBand or RoCE."""
    try:
        return any(pathlib.Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def has_nvidia() -> bool:
    """Whether there is a device file of NVIDIA's driver."""
    return pathlib.Path("/dev/nvidiactl").exists() or bool(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def system() -> str:
    """The system in one line."""
    return f"{platform.platform()}, {sys.executable}"


def file_system(directory: str) -> str | None:
    """The kind of file system that ``directory`` is on; None where nobody tells.

    >>> file_system("/proc")
    'proc'
    """
    path = os.path.realpath(directory)
    best: tuple[int, str | None] = (-1, None)
    try:
        lines = _text("/proc/self/mountinfo").splitlines()
    except OSError:
        return None
    for mount in lines:
        first, _, second = mount.partition(" - ")
        point = first.split()[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best[0]:  # a later mount hides an earlier one
            best = len(point), second.split()[0]
    return best[1]


def accelerate_config() -> pathlib.Path | None:
    """The file that ``accelerate launch`` reads when it is given none, if it is there."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    folder = pathlib.Path(home).expanduser() / "accelerate"
    for name in ("default_config.yaml", "default_config.yml", "default_config.json"):
        if (folder / name).is_file():
            return folder / name
    return None
