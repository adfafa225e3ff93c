"""The configuration that a run started here would have, and what it asks of the machine."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from disthooks.cli.machine import accelerate_config

#: The packages of sinks, by class name.
SINKS = {
    "TensorBoard": ("tensorboard", "pip install 'disthooks[tensorboard]'"),
    "WandB": ("wandb", "pip install 'disthooks[wandb]'"),
    "MLflow": ("mlflow", "pip install 'disthooks[mlflow]'"),
}


def configuration() -> tuple[dict[str, Any], Any]:
    """Which configuration wins here and what was passed over, in plain values; and the plan, or None."""
    from disthooks.config import from_config
    from disthooks.config.find import find
    from disthooks.errors import DisthooksError

    facts: dict[str, Any] = {"origin": None, "source": None, "passed_over": [], "error": None}
    try:
        found = find(engine_config=_deepspeed())
        facts |= {"origin": found.origin, "source": _plain(found.source), "passed_over": list(found.passed_over)}
        return facts, from_config(found.source)
    except DisthooksError as error:
        text = " ".join(str(error).split())
        nothing = facts["origin"] is None and "DISTHOOKS_CONFIG" not in os.environ and "no configuration" in text
        return facts | {"error": None if nothing else text}, None


def _plain(source: Any) -> Any:
    return dict(source) if isinstance(source, dict) else os.fspath(source)


def _deepspeed() -> Any:
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
