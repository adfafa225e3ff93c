"""``disthooks env``: what this machine is, and what would not work on it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import typer

from disthooks.cli import doctor
from disthooks.cli.doctor import Problem, problems
from disthooks.cli.output import console, document, line, progress, size, speed, table


def env(
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """Tell what this machine is, how fast it is, which configuration a run here has, and what would not work.

    It measures disks (256 MiB or a second each way) and the link to the GPU, and leaves nothing behind. Of several
    processes the first one answers.
    """
    if doctor.rank() != 0:
        return
    with progress(4) as begin:
        facts = gathered(begin)
    found = problems(facts)
    if as_json:
        document(facts | {"problems": [problem._asdict() for problem in found]})
    else:
        _show(facts, found)


def gathered(begin: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All facts, as ``--json`` has them; ``begin`` is told what is looked at next."""
    begin("looking for a configuration")
    config, plan = doctor.configuration()
    wanted: dict[str, list[str]] = {tempfile.gettempdir(): ["temporary"]}
    if plan is not None:
        config["missing"] = doctor.missing_sinks(plan)
        for directory, roles in doctor.directories(plan).items():
            wanted.setdefault(directory, []).extend(roles)
    begin("measuring the link to the GPU")
    link = doctor.link()
    begin(f"measuring {', '.join(wanted)}")
    directories = [doctor.directory_facts(path, roles) for path, roles in wanted.items()]
    begin("looking at what is installed")
    return {
        "versions": doctor.versions(),
        "system": doctor.system(),
        "torch": doctor.torch_facts(),
        "cpu": doctor.cores(),
        "memory": doctor.memory_facts(),
        "infiniband": doctor.has_infiniband(),
        "nvidia": doctor.has_nvidia(),
        "tools": doctor.tools(),
        "build_locks": doctor.build_locks(),
        "link": link,
        "directories": directories,
        "config": {"missing": []} | config,
        "environment": doctor.environment(),
        "accelerate": doctor.accelerate(),
    }


def _show(facts: dict[str, Any], found: list[Problem]) -> None:
    out = console()
    for title, rows in (
        ("software", _software(facts)),
        ("machine", _machine(facts)),
        ("directories", _directories(facts)),
        ("this run", _run(facts)),
    ):
        out.print(table(rows, title=title))
    if not found:
        line("nothing is known that would not work here", "green")
        return
    out.print(table([(i, *problem) for i, problem in enumerate(found, 1)], ("", "would not work", "why", "do")))


Rows = list[tuple[str, str]]


def _software(facts: dict[str, Any]) -> Rows:
    there = {name: version for name, version in facts["versions"].items() if version is not None}
    rows = [(name, there.pop(name)) for name in ("disthooks", "python", "torch") if name in there]
    about = facts["torch"]
    built = f"CUDA {about['cuda']}" if about["cuda"] else f"ROCm {about['hip']}" if about["hip"] else "no GPU"
    rows += [("built for", f"{built}; driver {about['driver'] or 'none'}")]
    rows += [("backends", ", ".join(about["backends"]) or "none")]
    rows += [("installed", ", ".join(f"{name} {version}" for name, version in there.items()))]
    rows += [
        ("not installed", ", ".join(name for name, version in facts["versions"].items() if version is None) or "-")
    ]
    return rows


def _machine(facts: dict[str, Any]) -> Rows:
    memory, cpu, link = facts["memory"], facts["cpu"], facts["link"]
    rows = [("system", facts["system"])]
    rows += [("cores", f"{cpu['there']}, {cpu['usable']} usable; torch has {facts['torch']['threads']} threads")]
    rows += [("memory", f"{size(memory['total_bytes'])}, {size(memory['available_bytes'])} available")]
    if memory["limit_bytes"] is not None:
        rows += [("limit of the container", size(memory["limit_bytes"]))]
    locked = "no limit" if memory["memlock_bytes"] is None else size(memory["memlock_bytes"])
    rows += [
        ("may be locked", locked),
        ("/dev/shm", f"{size(memory['shm_bytes'])}, {size(memory['shm_free_bytes'])} free"),
    ]
    for gpu in facts["torch"]["devices"]:
        room = f"{size(gpu['memory_bytes'])}, {size(gpu['free_bytes'])} free"
        node = "" if gpu["numa_node"] is None else f", NUMA node {gpu['numa_node']}"
        rows += [(f"GPU {gpu['index']}", f"{gpu['name']}, {room}, capability {gpu['capability']}{node}")]
    for name in ("pinned", "pageable") if link else ():
        way = [
            f"{speed(link[f'{name}_{way}'])} to the {end}" for way, end in (("to_device", "GPU"), ("to_host", "CPU"))
        ]
        rows += [(f"link, {name}", ", ".join(way))]
    return rows if facts["torch"]["devices"] else [*rows, ("GPUs", "none")]


def _directories(facts: dict[str, Any]) -> Rows:
    return [(there["path"], _directory(there)) for there in facts["directories"]]


def _directory(there: dict[str, Any]) -> str:
    roles = ", ".join(there["roles"])
    if there["error"]:
        return f"{roles}: {there['error']}"
    how = "past the page cache" if there["direct"] else "through the page cache, which may be all that is measured"
    speeds = f"writes {speed(there['write_bytes_per_s'])}, reads {speed(there['read_bytes_per_s'])}, one thread, {how}"
    return f"{roles}: {there['file_system']}, {size(there['free_bytes'])} free; {speeds}"


def _run(facts: dict[str, Any]) -> Rows:
    config, accelerate = facts["config"], facts["accelerate"]
    found = f"{config['source']} (by {config['origin']})" if config["source"] is not None else "none"
    rows = [("configuration", found)] + [("passed over", str(text)) for text in config["passed_over"]]
    if accelerate:
        kind = accelerate.get("distributed_type") or accelerate["error"]
        rows += [("accelerate's default", f"{accelerate['path']}: {kind}, {accelerate.get('num_processes')} processes")]
    return rows + list(facts["environment"].items())
