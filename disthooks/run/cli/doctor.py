"""The facts of this machine and of a run that is started here, and the problems that follow from them.

The first part of the file gathers facts, in plain values that JSON can hold. The second part has the rules, each of
which judges these facts by itself.
"""

# [Note: rules over facts]
# A rule looks at the facts that `disthooks env` shows, and never at the machine itself. So a test can give each rule
# facts that are written by hand, and the `--json` of a user's machine is enough to find the problem there. Each rule
# was written after a real failure, most often one without a message: docs/upstream/index.md and docs/launch.md describe them.

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

#: For each sink, by class name: the package that it needs, and the command that installs it.
SINKS = {
    "TensorBoard": ("tensorboard", "pip install 'disthooks[tensorboard]'"),
    "WandB": ("wandb", "pip install 'disthooks[wandb]'"),
    "MLflow": ("mlflow", "pip install 'disthooks[mlflow]'"),
}


def configuration() -> tuple[dict[str, Any], Any]:
    """Find the configuration that a run would use here.

    Returns:
        The facts: the place of the configuration, the configurations that it takes precedence over, and its error. And
        the plan; None if there is no configuration, or it is wrong.
    """
    from disthooks.config import from_config
    from disthooks.config.locate import locate_config
    from disthooks.errors import DisthooksError

    facts: dict[str, Any] = {"origin": None, "source": None, "passed_over": [], "error": None}
    try:  # the DeepSpeed JSON that `accelerate launch` names may have a configuration in it
        deepspeed = json.loads(pathlib.Path(os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]).read_text())
    except (KeyError, OSError, ValueError):
        deepspeed = None
    try:
        found = locate_config(engine_config=deepspeed)
        facts |= {
            "origin": found.origin,
            "source": os.fspath(found.source) if isinstance(found.source, (str, os.PathLike)) else dict(found.source),
            "passed_over": list(found.passed_over),
        }
        return facts, from_config(found.source)
    except DisthooksError as error:
        text = " ".join(str(error).split())
        nothing = facts["origin"] is None and "DISTHOOKS_CONFIG" not in os.environ and "no configuration" in text
        return facts | {"error": None if nothing else text}, None


def directories(plan: Any) -> dict[str, list[str]]:
    """The directories that the stores of ``plan`` write to, each with the entries that name it."""
    from disthooks._ranks import local_rank

    found: dict[str, list[str]] = {}
    for i, (_, pipeline) in enumerate(plan.saves):
        stores = [pipeline.store]
        while stores:
            store = stores.pop(0)
            for directory in getattr(store, "directories", ()):
                found.setdefault(directory.replace("{local_rank}", local_rank()), []).append(f"save.{i}")
            stores = [*getattr(store, "stores", ()), *stores]  # Tiered has stores inside it
    return found


def missing_sinks(plan: Any) -> list[tuple[str, str]]:
    """The sinks of ``plan`` whose package is not installed, each with the command that installs it."""
    found = []
    for make in plan.watches.get("sinks", ()):
        name = type(make()).__name__
        package, remedy = SINKS.get(name, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            found.append((name, remedy))
    return found


def accelerate() -> dict[str, Any] | None:
    """The values that rules need from the default file of ``accelerate launch``; None if there is no such file."""
    from disthooks.run.launcher.accelerate_config import default_file

    path = default_file()
    if path is None:
        return None
    facts: dict[str, Any] = {"path": path, "keys": [], "error": None}
    try:
        import yaml

        read = yaml.safe_load(_text(path))
    except ImportError:
        return facts | {"error": "PyYAML is not installed"}
    except (OSError, ValueError, yaml.YAMLError) as error:
        return facts | {"error": " ".join(str(error).split())}
    if not isinstance(read, dict):
        return facts | {"error": "it is not a mapping"}
    wanted = ("distributed_type", "num_processes", "num_machines", "use_cpu", "max_restarts")
    return facts | {"keys": sorted(map(str, read))} | {key: read.get(key) for key in wanted}


PACKAGES = (
    *("accelerate", "deepspeed", "lightning", "lz4", "mlflow-skinny", "numpy"),
    *("peft", "pydantic", "pyyaml", "ray", "rich", "tensorboard", "torchtitan", "transformers"),
    *("triton", "trl", "typer", "wandb", "zstandard"),
)
#: The environment variables that launchers and schedulers set for their processes.
_VARIABLES = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|DISTHOOKS_\w+"
    r"|PET_\w+|TORCHELASTIC_\w+|SLURM_(PROCID|LOCALID|NTASKS|NNODES|NODEID|JOB_ID|JOB_NODELIST|CPUS_PER_TASK)"
    r"|OMPI_COMM_WORLD_(RANK|SIZE)|PMI_(RANK|SIZE)|ACCELERATE_\w+|FSDP_VERSION|CUDA_VISIBLE_DEVICES|NCCL_SOCKET_IFNAME"
    r"|GLOO_SOCKET_IFNAME|TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
)


def versions() -> dict[str, str | None]:
    """The versions of disthooks and of the packages that it works with; None for a package that is not installed."""
    from disthooks import __version__

    found: dict[str, str | None] = {"disthooks": __version__, "python": platform.python_version()}
    for name in ("torch", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def environment() -> dict[str, str]:
    """The variables that launchers and schedulers have set for this process."""
    return {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}


def rank() -> int:
    """The rank of this process among those that run the same command; 0 if it is alone."""
    from disthooks._ranks import RANK_VARIABLES

    values = [os.environ.get(name, "") for name in (*RANK_VARIABLES, "PMI_RANK")]
    return next((int(value) for value in values if value.isdigit()), 0)


def torch_facts() -> dict[str, Any]:
    """How torch was built, and the GPUs that it finds."""
    import torch
    import torch.distributed as dist

    try:  # the version of NVIDIA's driver, from its kernel module
        driver = re.search(r"Kernel Module.*?\s(\d+\.\d+(\.\d+)?)\s", _text("/proc/driver/nvidia/version"))
    except OSError:
        driver = None
    devices = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {
                "index": index,
                "name": about.name,
                "capability": f"{about.major}.{about.minor}",
                "memory_bytes": total,
                "free_bytes": free,
            }
        )
    backends = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": driver[1] if driver else None,
        "backends": [name for name in backends if dist.is_available() and dist.is_backend_available(name)],
        "threads": torch.get_num_threads(),
        "devices": devices,
    }


def _text(path: str) -> str:
    return pathlib.Path(path).read_text(errors="replace")


def cores() -> dict[str, int]:
    """The cores of the machine, and those that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"there": os.cpu_count() or 1, "usable": usable}


def memory_facts() -> dict[str, int | None]:
    """Bytes of memory, of memory that may be locked, and of ``/dev/shm``. None means no limit, or not known."""
    from disthooks.saved.stores.host import container_memory, node_memory

    available, total, _ = node_memory() or (None, None, "")
    _, limit, _ = container_memory() or (None, None, "")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        shm = None
    return {
        "total_bytes": total,
        "available_bytes": available,
        "limit_bytes": limit,
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "shm_bytes": shm and shm.total,
        "shm_free_bytes": shm and shm.free,
    }


def tools() -> dict[str, str | None]:
    """The paths of programs that launchers and builds of operators call; None for a missing program."""
    compiler = os.environ.get("CXX", "c++")
    found = {name: shutil.which(name) for name in ("mpirun", "ninja", "nvcc", "srun", "torchrun")}
    return {"c++": shutil.which(compiler) or shutil.which("g++"), **found}


def build_locks() -> list[dict[str, Any]]:
    """The lock files of operators that are being built, or whose build was killed; ages in seconds."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    found = []
    for lock in pathlib.Path(folder).expanduser().glob("**/lock"):
        with contextlib.suppress(OSError):  # the build has ended meanwhile, and the file is gone
            found.append({"path": str(lock), "age_s": round(time.time() - lock.stat().st_mtime)})
    return found


def has_infiniband() -> bool:
    try:
        return any(pathlib.Path("/sys/class/infiniband").iterdir())
    except OSError:
        return False


def has_nvidia() -> bool:
    """Whether there is a device file of NVIDIA's driver."""
    return pathlib.Path("/dev/nvidiactl").exists() or bool(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def system() -> str:
    """The operating system and the path of Python, in one line."""
    return f"{platform.platform()}, {sys.executable}"


def file_system(directory: str) -> str | None:
    """The kind of file system that ``directory`` is on; None if the kernel does not say.

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


Facts = Mapping[str, Any]
_YES = ("1", "true", "yes")  # the values with which a variable of accelerate is on
_ALONE = "each process would believe to be alone, train on all the data, and not add up gradients with the others"
_LITTLE_DISK = 1 << 30
_LITTLE_SHM = 1 << 30
_LITTLE_LOCKED = 1 << 30
_LONG_BUILD = 600  # seconds; the longest build that was measured took 330


class Problem(NamedTuple):
    """A thing that would not work here, the reason, and the remedy."""

    what: str
    why: str
    do: str


def problems(facts: Facts) -> list[Problem]:
    """The problems that a run would meet, in the order in which it would meet them. See [Note: rules over facts]."""
    return [Problem(*found) for rule in RULES for found in rule(facts)]


#: What a rule yields: for each problem the texts of a :class:`Problem`.
Told = Iterator[tuple[str, str, str]]


def _configuration(facts: Facts) -> Told:
    if facts["config"]["error"]:
        yield "the configuration", facts["config"]["error"], "correct it: `disthooks check FILE` shows the same error"
    for name, remedy in facts["config"].get("missing", ()):
        yield f"the sink {name}", "its package is not installed, so the run would fail when it attaches", remedy
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
            why = f"{there['free_bytes'] / 1e9:.2f} GB are free, and the saved tensors of one forward need room"
            yield where, why, "free some space, or name another directory"
        elif str(there["file_system"]).startswith(("nfs", "cifs", "smb", "9p", "lustre", "ceph", "beegfs", "fuse.")):
            why = f"it may be a network's ({there['file_system']}): all processes share its speed, {there['roles']}"
            yield where, why, "name a directory on a disk of the node itself"


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
        yield "copies between GPU and CPU", facts["link"]["error"], "free memory, or raise the limit of locked memory"


def _devices(facts: Facts) -> Told:
    torch, told = facts["torch"], facts["environment"]
    here = int(told.get("LOCAL_WORLD_SIZE", "1"))
    if torch["cuda"] and not torch["devices"]:
        why = f"torch was built for CUDA {torch['cuda']} and sees no GPU (driver: {torch['driver'] or 'none'})"
        yield "GPUs", why, "if this machine has a GPU, check CUDA_VISIBLE_DEVICES and the version of the driver"
    if facts["nvidia"] and not torch["cuda"]:
        yield "GPUs", "this machine has one, and this torch was built without CUDA", "install a torch with CUDA"
    if 0 < len(torch["devices"]) < here:
        why = f"{here} processes of this node share {len(torch['devices'])} GPUs, which nccl refuses"
        yield "GPUs", why, "start as many processes as there are GPUs"
    if "gloo" not in torch["backends"]:
        yield "several processes", "this torch has no gloo, which gathers CPU tensors", "install a torch that has gloo"
    if torch["devices"] and here > 1 and "nccl" not in torch["backends"]:
        yield "several GPUs", "this torch has no nccl", "install a torch that has nccl"


def _deepspeed(facts: Facts) -> Told:
    for lock in facts["build_locks"]:
        if lock["age_s"] > _LONG_BUILD:
            why = (
                f"{lock['path']} is {lock['age_s'] // 60} minutes old: a killed build left it, and every process that "
            )
            why += "needs the operator waits for it, without a message (DeepSpeed on a CPU builds one when it starts)"
            yield "operators built when first used", why, "delete that file, unless a build is running"
    if facts["versions"]["deepspeed"] is None:
        return
    lacking = [name for name in ("c++", "ninja") if not facts["tools"][name]]
    if facts["torch"]["devices"] and not facts["tools"]["nvcc"]:
        lacking.append("nvcc")
    if lacking:
        why = f"{', '.join(lacking)} cannot be found, and DeepSpeed builds its optimizers and async_io when first used"
        yield "DeepSpeed's own operators", why, "install them, or use torch's optimizers and no offload"


def _number(told: Mapping[str, str], *names: str) -> int:
    """The value of the first of the variables ``names`` that is a number; 1 if none is."""
    return next((int(told[name]) for name in names if told.get(name, "").isdigit()), 1)


def _whole(value: Any, otherwise: int) -> int:
    """``value`` if it is a whole number, else ``otherwise``: a user's file may have any value there."""
    return value if isinstance(value, int) else otherwise


def _alone(facts: Facts) -> Told:
    told = facts["environment"]
    world = _number(told, "WORLD_SIZE")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in told]
    if world > 1 and missing:
        why = f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set, so no process group can be made; {_ALONE}"
        yield "several processes", why, "start them with torchrun, accelerate launch, deepspeed or `disthooks launch`"
    started = {"srun": "SLURM_NTASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "a PMI launcher": "PMI_SIZE"}
    for by, name in started.items():
        if _number(told, name) > 1 and "WORLD_SIZE" not in told:
            yield (
                "several processes",
                f"{by} started {told[name]} ({name}), and torch reads none of its variables; {_ALONE}",
                "start one task on each node, and torchrun in it, as launch/slurm.sbatch does",
            )


def _rendezvous(facts: Facts) -> Told:
    told = facts["environment"]
    world, here = _number(told, "WORLD_SIZE"), _number(told, "LOCAL_WORLD_SIZE")
    if world > here > 0 and "LOCAL_WORLD_SIZE" in told and told.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        why = f"MASTER_ADDR is {told['MASTER_ADDR']}, and {world - here} of {world} processes are on other nodes"
        yield "several nodes", why, "give the address of the first node"


def _restarts(facts: Facts) -> Told:
    told = facts["environment"]
    restarts = max(
        _number(told, name) if name in told else 0 for name in ("PET_MAX_RESTARTS", "TORCHELASTIC_MAX_RESTARTS")
    )
    restarts = max(restarts, _whole((facts["accelerate"] or {}).get("max_restarts"), 0))
    if restarts and told.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        why = f"--max-restarts {restarts} never recovered with torch 2.13 and gloo: "
        why += "the store ends with the first attempt"
        yield "restarts", why, "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of torchrun"


def _threads(facts: Facts) -> Told:
    told, usable = facts["environment"], facts["cpu"]["usable"]
    processes = max(_number(told, "LOCAL_WORLD_SIZE"), _number(told, "PET_NPROC_PER_NODE"))
    wanted = max(1, usable // processes)
    if processes > 1 and told.get("OMP_NUM_THREADS", "1") == "1" and wanted > 1:
        why = f"torchrun sets OMP_NUM_THREADS to 1 if it is not set: {processes} of {usable} cores would compute"
        yield "threads", why, f"set OMP_NUM_THREADS={wanted}"


def _accelerate(facts: Facts) -> Told:
    config = facts["accelerate"] or {}
    kind, count = str(config.get("distributed_type", "")).upper(), _whole(config.get("num_processes"), 1)
    where = f"accelerate launch with {config.get('path')}"
    if "disthooks" in config.get("keys", ()):
        why = "accelerate refuses keys that it does not know, and `disthooks` is one of them"
        do = "use `disthooks launch --config_file FILE`, which removes the key; or set DISTHOOKS_CONFIG=hooks.yaml"
        yield where, why, do
    if kind == "MULTI_CPU" and count > 1 and not facts["tools"]["mpirun"]:
        yield where, f"MULTI_CPU without mpirun starts one process, not {count}", "use torchrun, or install an MPI"
    if kind == "MULTI_GPU" and config.get("use_cpu"):
        yield where, f"MULTI_GPU with use_cpu: {_ALONE}", "use distributed_type: MULTI_CPU with an MPI, or torchrun"
    # On a CPU accelerate does not use some engines. `accelerate launch` sets these variables from its options.
    told, on_cpu = facts["environment"], bool(config.get("use_cpu"))
    if told.get("ACCELERATE_USE_CPU", "").lower() in _YES:
        on_cpu, where = True, "ACCELERATE_USE_CPU"
        for name, engine in (("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"), ("ACCELERATE_USE_FSDP", "FSDP")):
            kind = engine if told.get(name, "").lower() in _YES else kind
    if on_cpu and kind in ("DEEPSPEED", "FSDP"):
        why = f"on the CPU accelerate makes DDP of {kind} and does not say so: nothing would be sharded"
        yield where, why, "without GPUs use the engine without accelerate: torchrun with fully_shard, or deepspeed"
    if kind == "DEEPSPEED" and not facts["torch"]["devices"] and facts["versions"]["transformers"] is None:
        yield (
            where,
            "accelerate's DeepSpeed needs transformers on a CPU, and it is not installed",
            "pip install transformers",
        )


RULES: tuple[Callable[[Facts], Told], ...] = (
    _alone,
    _rendezvous,
    _restarts,
    _threads,
    _accelerate,
    _configuration,
    _directories,
    _memory,
    _devices,
    _deepspeed,
)
