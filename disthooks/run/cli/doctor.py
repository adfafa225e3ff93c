"""The facts of this machine and of a run that is started here, and the problems that follow from them.

The first part of the file gathers facts, in plain values that JSON can hold. The second part has the rules, each of
which judges these facts by itself.
"""

# [Note: rules over facts]
# A rule looks at the facts that `disthooks env` shows, and never at the machine itself. So a test can give each rule
# facts that are written by hand, and the `--json` of a user's machine is enough to find the problem there. The rules
# are about what disthooks itself needs. docs/launch.md has what launchers do without a message.

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import resource
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

#: For each sink, by class name: the package that it needs, and the command that installs it.
SINKS = {
    "TensorBoard": ("tensorboard", "pip install 'disthooks[tensorboard]'"),
    "WandB": ("wandb", "pip install 'disthooks[wandb]'"),
    "MLflow": ("mlflow", "pip install 'disthooks[mlflow]'"),
}


def configuration() -> tuple[dict[str, Any], Any]:
    """The configuration that a run would use here: the facts about it, and the plan, None if it is wrong or missing."""
    from disthooks.config import from_config
    from disthooks.errors import DisthooksError
    from disthooks.run.launcher.worker import Command
    from disthooks.run.launcher.worker import configuration as locate

    facts: dict[str, Any] = {"origin": None, "source": None, "passed_over": [], "error": None, "missing": []}
    try:
        found = locate(Command(target="train.py"))  # what a worker finds whose arguments name no file
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


PACKAGES = (
    *("accelerate", "deepspeed", "lightning", "lz4", "mlflow-skinny", "numpy"),
    *("peft", "pydantic", "pyyaml", "ray", "rich", "tensorboard", "torchtitan", "transformers"),
    *("trl", "typer", "wandb", "zstandard"),
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


def torch_facts() -> dict[str, Any]:
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
        facts = {"index": index, "name": about.name, "capability": f"{about.major}.{about.minor}"}
        devices.append(facts | {"memory_bytes": total, "free_bytes": free})
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


def memory_facts() -> dict[str, int | None]:
    """Bytes of memory, and of memory that may be locked. None means no limit, or not known."""
    from disthooks.saved.stores.host import container_memory, node_memory

    available, total, _ = node_memory() or (None, None, "")
    _, limit, _ = container_memory() or (None, None, "")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "total_bytes": total,
        "available_bytes": available,
        "limit_bytes": limit,
        "memlock_bytes": None if soft == resource.RLIM_INFINITY else soft,
    }


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


_LITTLE_DISK = 1 << 30
_OF_NETWORKS = ("nfs", "cifs", "smb", "9p", "lustre", "ceph", "beegfs", "fuse.")


class Problem(NamedTuple):
    """A thing that would not work here, the reason, and the remedy."""

    what: str
    why: str
    do: str


def problems(facts: Mapping[str, Any]) -> list[Problem]:
    """The problems that a run would meet here. See [Note: rules over facts]."""
    return [Problem(*found) for rule in (_configuration, _directories, _devices) for found in rule(facts)]


#: What a rule yields: for each problem the texts of a :class:`Problem`.
Told = Iterator[tuple[str, str, str]]


def _configuration(facts: Mapping[str, Any]) -> Told:
    config = facts["config"]
    if config["error"]:
        yield "the configuration", config["error"], "correct it: `disthooks check FILE` shows the same error"
    for name, remedy in config["missing"]:
        yield f"the sink {name}", "its package is not installed, so the run would fail when it attaches", remedy
    for name in ("pydantic", "pyyaml") if config["source"] is not None else ():
        if facts["versions"][name] is None:
            yield "configuration files", f"{name} is not installed", "pip install 'disthooks[config]'"


def _directories(facts: Mapping[str, Any]) -> Told:
    for there in facts["directories"]:
        where, kind = f"saved tensors in {there['path']}", str(there["file_system"])
        if there["error"]:
            yield where, there["error"], "name a directory that exists and can be written"
        elif there["in_memory"]:
            why = f"{kind} is memory: tensors that are moved there stay in memory"
            yield where, why, "name a directory on a disk; TMPDIR moves the temporary directory"
        elif there["free_bytes"] < _LITTLE_DISK:
            why = f"{there['free_bytes'] / 1e9:.2f} GB are free, and the saved tensors of one forward need room"
            yield where, why, "free some space, or name another directory"
        elif kind.startswith(_OF_NETWORKS):
            why = f"it may be a network's ({kind}): all processes share its speed, {there['roles']}"
            yield where, why, "name a directory on a disk of the node itself"


def _devices(facts: Mapping[str, Any]) -> Told:
    torch = facts["torch"]
    if facts["link"] and facts["link"]["error"]:
        yield "copies between GPU and CPU", facts["link"]["error"], "free memory, or raise the limit of locked memory"
    if torch["cuda"] and not torch["devices"]:
        why = f"torch was built for CUDA {torch['cuda']} and sees no GPU (driver: {torch['driver'] or 'none'})"
        yield "GPUs", why, "if this machine has a GPU, check CUDA_VISIBLE_DEVICES and the version of the driver"
    if torch["driver"] and not torch["cuda"]:
        yield "GPUs", "NVIDIA's driver is there, and this torch was built without CUDA", "install a torch with CUDA"
    for backend, is_needed in (("gloo", True), ("nccl", len(torch["devices"]) > 1)):
        if is_needed and backend not in torch["backends"]:
            yield "several processes", f"this torch has no {backend}", f"install a torch that has {backend}"
