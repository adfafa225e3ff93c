"""What would not work here, why, and what to do: rules over the facts that ``disthooks env`` has gathered.

Each was seen to go wrong, most of them without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from disthooks.cli.launchers import LAUNCHERS

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
