"""``disthooks env``: show the facts of this machine, and the problems that a run would meet on it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import typer

from disthooks.run.cli import doctor
from disthooks.run.cli.doctor import Problem, problems
from disthooks.run.cli.output import console, document, line, progress, size, table

_WIDTH = 100  # columns at most, also in a pipe: one cell lists all packages
_SUFFIX = re.compile("_bytes(_per_s)?$")  # of names of facts: the unit stands with the number


def env(
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """Tell what this machine is, how fast it is, which configuration a run here has, and what would not work.

    It measures the disks (256 MiB or one second each way) and the link to the GPU, and leaves no files. If a launcher
    starts several processes, only the first one prints.
    """
    from disthooks._ranks import RANK_VARIABLES, first_set

    if (first_set((*RANK_VARIABLES, "PMI_RANK")) or "0") != "0":
        return
    with progress(4) as begin:
        facts = gathered(begin)
    found = problems(facts)
    if as_json:
        document(facts | {"problems": [problem._asdict() for problem in found]})
    else:
        _show(facts, found)


def gathered(begin: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All facts, in the layout of ``--json``."""
    begin("looking for a configuration")
    config, plan = doctor.configuration()
    wanted: dict[str, list[str]] = {tempfile.gettempdir(): ["temporary"]}
    if plan is not None:
        config["missing"] = doctor.missing_sinks(plan)
        for directory, roles in doctor.directories(plan).items():
            wanted.setdefault(directory, []).extend(roles)
    begin("measuring the link to the GPU")
    link = measured_link()
    begin(f"measuring {', '.join(wanted)}")
    directories = [directory_facts(path, roles) for path, roles in wanted.items()]
    begin("looking at what is installed")
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return {
        "versions": doctor.versions(),
        "system": f"{platform.platform()}, {sys.executable}",
        "torch": doctor.torch_facts(),
        "cpu": {"there": cores, "usable": usable},
        "memory": doctor.memory_facts(),
        "link": link,
        "directories": directories,
        "config": config,
        "environment": doctor.environment(),
    }


def _show(facts: dict[str, Any], found: list[Problem]) -> None:
    out = console()
    width = min(_WIDTH, out.width)
    rows = [(name, each) for name, value in facts.items() for each in (value if isinstance(value, list) else [value])]
    out.print(table([(name, _text(name, value)) for name, value in rows]), width=width)
    if found:
        numbered = [(i, each.what, each.why, each.do) for i, each in enumerate(found, 1)]
        out.print(table(numbered, ("", "would not work", "why", "do")), width=width)
    else:
        line("nothing is known that would not work here", "green")


def _text(name: str, value: Any) -> str:
    """``value``, the fact ``name``, as a text for people: what is not known is left out.

    >>> _text("memory", {"total_bytes": 3 << 30, "limit_bytes": None})
    'total 3.0 GiB'
    """
    if isinstance(value, dict):
        known = {key: each for key, each in value.items() if each is not None and each != []}
        return ", ".join(f"{_SUFFIX.sub('', key)} {_text(key, each)}" for key, each in known.items()) or "-"
    if isinstance(value, (list, tuple)):
        return "; ".join(_text("", each) for each in value)
    if isinstance(value, (int, float)) and name.endswith(("_per_s", "_to_device", "_to_host")):
        return f"{value / 1e9:.2f} GB/s"
    if isinstance(value, int) and name.endswith("_bytes"):
        return size(value)
    return "-" if value is None else str(value)


# -- how fast bytes move: each measurement takes a second or two, and leaves no files

#: Bounds of one measurement: bytes, and seconds.
MOST, SECONDS = 256 << 20, 1.0
_ROOM = 8  # a measurement of a disk takes at most an eighth of its free bytes
_LEAST = 32 << 20  # bytes; with less room the speed of a disk is not measured
_COPIES = 8  # how many copies are measured each way


def directory_facts(path: str, roles: list[str]) -> dict[str, Any]:
    """The file system of ``path``, and its speed for the same kind of file that ``OnDisk`` would make there."""
    kind = doctor.file_system(path)
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
    except RuntimeError as error:  # a StoreError, or there is no memory for the measurement
        return facts | {"error": " ".join(str(error).split())}


def _measured(path: str, most: int) -> dict[str, Any]:
    """The speed of one thread that moves 8 MiB at a time."""
    from disthooks.saved.stores.host import AlignedPool
    from disthooks.saved.stores.scratch_file import CHUNK, ScratchFile

    file = ScratchFile(path, "auto")
    if most < _LEAST:
        return {"direct": file.direct}
    lease = AlignedPool().lease(CHUNK)
    block = memoryview(lease).cast("B")[:CHUNK]
    block[:] = os.urandom(CHUNK)  # random, because a file system may compress
    extent = file.allocate(most)
    try:
        written, write = _timed(lambda offset: file.write(block, extent.offset + offset), most // CHUNK * CHUNK, CHUNK)
        _, read = _timed(lambda offset: file.read(block, extent.offset + offset, CHUNK), written, CHUNK)
    finally:
        file.release(extent)
        file.shrink(keep_peak=False)
    return {"direct": file.direct, "write_bytes_per_s": write, "read_bytes_per_s": read}


def _timed(move: Callable[[int], object], most: int, step: int) -> tuple[int, float]:
    """Move ``step`` bytes at a time, up to ``most`` bytes or ``SECONDS``; return the bytes, and bytes a second."""
    begin, done, took = time.perf_counter(), 0, 0.0
    while done < most and took < SECONDS:
        move(done)
        done += step
        took = time.perf_counter() - begin
    return done, done / took


def measured_link() -> dict[str, Any] | None:
    """Bytes a second between CPU memory (pinned, and pageable) and the first GPU, each way; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    found: dict[str, Any] = {"error": None}
    for name, pinned in (("pinned", True), ("pageable", False)):
        try:
            host = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=pinned)
            device = torch.empty(host.shape, dtype=host.dtype, device="cuda")
            for way, target, source in (("to_device", device, host), ("to_host", host, device)):
                target.copy_(source, non_blocking=True)  # not measured, because the first copy is slow
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(_COPIES):
                    target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                found[f"{name}_{way}"] = source.nbytes * _COPIES / (time.perf_counter() - begin)
        except RuntimeError as error:  # the device has no room, or no memory can be pinned
            found |= {f"{name}_to_device": None, f"{name}_to_host": None, "error": f"{name}: {error}".splitlines()[0]}
    return found
