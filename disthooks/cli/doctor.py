"""The configuration that a run started here would have, and what it asks of the machine.

What this machine is: facts, in plain values that JSON can hold.

What would not work here, why, and what to do: rules over the facts that ``disthooks env`` has gathered.

Each was seen to go wrong, most of them without a word.

How fast bytes move here: to a disk and back, to a GPU and back. Each takes a second or two and leaves nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from disthooks.cli.launch import LAUNCHERS

#: The packages of sinks, by class name.
SINKS = {
    "TensorBoard": ("tensorboard", "pip install 'disthooks[tensorboard]'"),
    "WandB": ("wandb", "pip install 'disthooks[wandb]'"),
    "MLflow": ("mlflow", "pip install 'disthooks[mlflow]'"),
}


def configuration() -> tuple[dict[str, Any], Any]:
    """Which configuration wins here and what was passed over, in plain values; and the plan, or None."""
    from disthooks.config import from_config
    from disthooks.config.locate import find
    from disthooks.errors import DisthooksError

    facts: dict[str, Any] = {"origin": None, "source": None, "passed_over": [], "error": None}
    try:
        found = find(engine_config=_deepspeed_config())
        facts |= {"origin": found.origin, "source": _plain(found.source), "passed_over": list(found.passed_over)}
        return facts, from_config(found.source)
    except DisthooksError as error:
        text = " ".join(str(error).split())
        nothing = facts["origin"] is None and "DISTHOOKS_CONFIG" not in os.environ and "no configuration" in text
        return facts | {"error": None if nothing else text}, None


def _plain(source: Any) -> Any:
    return dict(source) if isinstance(source, dict) else os.fspath(source)


def _deepspeed_config() -> Any:
    """The DeepSpeed JSON that ``accelerate launch`` names, if there is one."""
    try:
        return json.loads(pathlib.Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
    except (KeyError, OSError, ValueError):
        return None


def directories(plan: Any) -> dict[str, list[str]]:
    """The directories that the stores of ``plan`` write to, and where it says so."""
    found: dict[str, list[str]] = {}
    for i, (_, line) in enumerate(plan.saves):
        for directory in _of_store(line.store):
            found.setdefault(directory, []).append(f"save.{i}")
    return found


def _of_store(store: Any) -> Iterator[str]:
    here = os.environ.get("LOCAL_RANK", "0")
    for directory in getattr(store, "directories", ()):
        yield directory.replace("{local_rank}", here)
    for inner in getattr(store, "stores", ()):
        yield from _of_store(inner)


def missing_sinks(plan: Any) -> list[tuple[str, str]]:
    """The sinks of ``plan`` whose package is not installed, and what installs it."""
    found = []
    for make in plan.watches.get("sinks", ()):
        name = type(make()).__name__
        package, remedy = SINKS.get(name, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            found.append((name, remedy))
    return found


def accelerate() -> dict[str, Any] | None:
    """What matters of the file that ``accelerate launch`` reads when it is given none; None without one."""
    path = accelerate_config()
    if path is None:
        return None
    facts: dict[str, Any] = {"path": str(path), "keys": [], "error": None}
    try:
        import yaml

        read = yaml.safe_load(path.read_text())
    except ImportError:
        return facts | {"error": "PyYAML is not installed"}
    except (OSError, ValueError, yaml.YAMLError) as error:
        return facts | {"error": " ".join(str(error).split())}
    if not isinstance(read, dict):
        return facts | {"error": "it is not a mapping"}
    wanted = ("distributed_type", "num_processes", "num_machines", "use_cpu", "max_restarts")
    return facts | {"keys": sorted(map(str, read))} | {key: read.get(key) for key in wanted}


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


Facts = Mapping[str, Any]
_LITTLE_DISK = 1 << 30
_LITTLE_SHM = 1 << 30
_LITTLE_LOCKED = 1 << 30
_LONG_BUILD = 600  # seconds; the longest that was seen took 330


class Problem(NamedTuple):
    """One thing that would not work."""

    what: str
    why: str
    do: str


def problems(facts: Facts) -> list[Problem]:
    """All that the facts give reason for, in the order in which they would be met."""
    return [Problem(*found) for rule in RULES for found in rule(facts)]


Told = Iterator[tuple[str, str, str]]


def _configuration(facts: Facts) -> Told:
    if facts["config"]["error"]:
        yield "the configuration", facts["config"]["error"], "mend it: `disthooks check FILE` says the same"
    for name, remedy in facts["config"].get("missing", ()):
        yield f"the sink {name}", "its package is not installed; the run would stop when it attaches", remedy
    if facts["config"]["source"] is None:
        return
    for name, package in (("pydantic", "pydantic"), ("pyyaml", "PyYAML")):
        if facts["versions"][name] is None:
            yield "configuration files", f"{package} is not installed", "pip install 'disthooks[config]'"


def _directories(facts: Facts) -> Told:
    for there in facts["directories"]:
        where = f"saved tensors in {there['path']}"
        if there["error"]:
            yield where, there["error"], "name a directory that exists and can be written"
        elif there["in_memory"]:
            why = f"{there['file_system']} is memory: tensors that are moved there stay in memory"
            yield where, why, "name a directory on a disk; TMPDIR moves the temporary directory"
        elif there["free_bytes"] < _LITTLE_DISK:
            why = f"{there['free_bytes'] / 1e9:.2f} GB are free, and one forward must have room"
            yield where, why, "make room, or name another directory"
        elif str(there["file_system"]).startswith(("nfs", "cifs", "smb", "9p", "lustre", "ceph", "beegfs", "fuse.")):
            why = f"it may be a network's ({there['file_system']}): all processes share its speed, {there['roles']}"
            yield where, why, "a disk of the node itself is better"


def _memory(facts: Facts) -> Told:
    memory = facts["memory"]
    if memory["shm_bytes"] is not None and memory["shm_bytes"] < _LITTLE_SHM:
        why = f"it has {memory['shm_bytes'] / 1e6:.0f} MB: workers of a DataLoader and nccl die of a bus error"
        yield "/dev/shm", why, "docker run --shm-size 8g (or --ipc host); in Kubernetes an emptyDir of medium Memory"
    locked = memory["memlock_bytes"]
    if facts["infiniband"] and locked is not None and locked < _LITTLE_LOCKED:
        why = f"{locked} bytes may be locked, and InfiniBand registers its buffers against that limit"
        yield "memlock", why, "ulimit -l unlimited; docker run --ulimit memlock=-1"
    if facts["link"] and facts["link"]["error"]:
        yield "copies between GPU and CPU", facts["link"]["error"], "free memory, or raise the limit of what is locked"


def _devices(facts: Facts) -> Told:
    torch, told = facts["torch"], facts["environment"]
    here = int(told.get("LOCAL_WORLD_SIZE", "1"))
    if torch["cuda"] and not torch["devices"]:
        why = f"torch was built for CUDA {torch['cuda']} and sees no GPU (driver: {torch['driver'] or 'none'})"
        yield "GPUs", why, "none is needed; if there is one, look at CUDA_VISIBLE_DEVICES and the driver's version"
    if facts["nvidia"] and not torch["cuda"]:
        yield "GPUs", "there is one, and this torch was built without CUDA", "install a torch that has it"
    if 0 < len(torch["devices"]) < here:
        why = f"{here} processes of this node share {len(torch['devices'])} GPUs, which nccl refuses"
        yield "GPUs", why, "start as many processes as there are GPUs"
    if "gloo" not in torch["backends"]:
        yield "several processes", "this torch has no gloo, which gathers what is not on a GPU", "install another torch"
    if torch["devices"] and here > 1 and "nccl" not in torch["backends"]:
        yield "several GPUs", "this torch has no nccl", "install another torch"


def _deepspeed(facts: Facts) -> Told:
    for lock in facts["build_locks"]:
        if lock["age_s"] > _LONG_BUILD:
            why = f"{lock['path']} is {lock['age_s'] // 60} minutes old: a build that was killed left it, and whoever "
            why += "wants the operator waits for it without a word (DeepSpeed on a CPU builds one when it starts)"
            yield "operators built when first used", why, "delete that file, unless a build is under way"
    if facts["versions"]["deepspeed"] is None:
        return
    lacking = [name for name in ("c++", "ninja") if not facts["tools"][name]]
    if facts["torch"]["devices"] and not facts["tools"]["nvcc"]:
        lacking.append("nvcc")
    if lacking:
        why = f"{', '.join(lacking)} cannot be found, and DeepSpeed builds its optimizers and async_io when first used"
        yield "DeepSpeed's own operators", why, "install them, or use torch's optimizers and no offload"


RULES: tuple[Callable[[Facts], Told], ...] = (*LAUNCHERS, _configuration, _directories, _memory, _devices, _deepspeed)


#: Bounds of one measurement.
MOST, SECONDS = 256 << 20, 1.0
_ROOM = 8  # at most an eighth of what is free
_LEAST = 32 << 20


def directory_facts(path: str, roles: list[str]) -> dict[str, Any]:
    """What ``path`` is and gives, measured by the file that ``OnDisk`` would have there."""
    kind = file_system(path)
    facts: dict[str, Any] = {
        "path": path,
        "roles": roles,
        "file_system": kind,
        "in_memory": kind in ("tmpfs", "ramfs", "devtmpfs"),
        "free_bytes": None,
        "direct": None,
        "write_bytes_per_s": None,
        "read_bytes_per_s": None,
        "error": None,
    }
    try:
        facts["free_bytes"] = shutil.disk_usage(path).free
        return facts | _measured(path, min(MOST, facts["free_bytes"] // _ROOM))
    except OSError as error:
        return facts | {"error": f"{path}: {error.strerror}"}
    except RuntimeError as error:  # a StoreError is one, and the memory to measure with may be missing
        return facts | {"error": " ".join(str(error).split())}


def _measured(path: str, most: int) -> dict[str, Any]:
    """The speed of one thread that moves 8 MiB at a time; ``OnDisk`` has several."""
    from disthooks.saved.stores.pools import AlignedPool
    from disthooks.saved.stores.scratch_file import CHUNK, ScratchFile

    file = ScratchFile(path, "auto")
    if most < _LEAST:
        return {"direct": file.direct}
    lease = AlignedPool().lease(CHUNK)
    block = memoryview(lease).cast("B")[:CHUNK]
    block[:] = os.urandom(CHUNK)  # a file system may compress
    extent = file.allocate(most)
    try:
        written, write = _timed(lambda offset: file.write(block, extent.offset + offset), most // CHUNK * CHUNK, CHUNK)
        _, read = _timed(lambda offset: file.read(block, extent.offset + offset, CHUNK), written, CHUNK)
    finally:
        file.release(extent)
        file.shrink(keep_peak=False)
    return {"direct": file.direct, "write_bytes_per_s": write, "read_bytes_per_s": read}


def _timed(move: Callable[[int], object], most: int, step: int) -> tuple[int, float]:
    """Bytes moved until ``most`` or the time is reached, and bytes a second."""
    begin, done, took = time.perf_counter(), 0, 0.0
    while done < most and took < SECONDS:
        move(done)
        done += step
        took = time.perf_counter() - begin
    return done, done / took


def link() -> dict[str, Any] | None:
    """Bytes a second between the CPU's memory and the first GPU, from pinned and from pageable memory."""
    import torch

    if not torch.cuda.is_available():
        return None
    found: dict[str, Any] = {"error": None}
    for name, pinned in (("pinned", True), ("pageable", False)):
        try:
            found |= _copies(name, pinned)
        except RuntimeError as error:  # no room on the device, or no memory that may be pinned
            found |= {f"{name}_to_device": None, f"{name}_to_host": None, "error": f"{name}: {error}".splitlines()[0]}
    return found


def _copies(name: str, pinned: bool) -> dict[str, float]:
    import torch

    host = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=pinned)
    device = torch.empty(host.shape, dtype=host.dtype, device="cuda")
    ways = {"to_device": (device, host), "to_host": (host, device)}
    return {f"{name}_{way}": _copied(target, source) for way, (target, source) in ways.items()}


def _copied(target: Any, source: Any, times: int = 8) -> float:
    import torch

    target.copy_(source, non_blocking=True)  # the first is slow
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return float(source.nbytes * times / (time.perf_counter() - begin))
