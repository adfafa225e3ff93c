"""The command line: commands, flags, first lines of help, keys of ``--json``; variables of the environment."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

import disthooks as dh
from tests.golden import golden_runs

#: The private objects that golden files need. This table is what to change when one of them moves.
PRIVATE = {"app": "disthooks.run.cli.app:app"}

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), torch.ones(5, 3)
"""
HOOKS = """
save:
  - {modules: "0", at_least: 0, recompute: {kind: Recompute}, store: {kind: OnDisk, directory: FOLDER}}
  - {modules: "1", at_least: 0, codecs: [{kind: Cast, dtype: bfloat16}], store: {kind: OnCpu}}
watch:
  groups: {biases: "*.bias"}
  rules:
    - {kind: only, pattern: "*.bias", rule: {kind: ClipValue, low: -0.1, high: 0.1}}
    - {kind: ClipNorm, max_norm: 0.5}
  stats: [{kind: Norm}, {kind: NonFinite}]
  sinks: [{kind: Jsonl, path: FOLDER/run/gradients.jsonl}]
"""


def private(name: str) -> Any:
    """The private object of that name."""
    module, _, attribute = PRIVATE[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def commands() -> dict[str, Any]:
    """Every command with its parameters, how ``python -m disthooks.run`` is called, variables of the environment."""
    import typer

    whole: Any = typer.main.get_command(private("app"))
    listed = {"": whole, **whole.commands}
    found: dict[str, Any] = {f"disthooks {name}".strip(): _command(command) for name, command in listed.items()}
    usage = subprocess.run(
        [sys.executable, "-m", "disthooks.run", "--help"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    found["python -m disthooks.run"] = [line.strip() for line in usage.partition("\n\n")[0].splitlines()]
    found["environment"] = _variables()
    return found


def _command(command: Any) -> dict[str, Any]:
    """Flags, their defaults, and the first line of the help."""
    parameters = {}
    for each in command.params:
        if each.name == "help" or "completion" in each.name:
            continue
        name = "/".join([*each.opts, *each.secondary_opts])
        is_option = each.param_type_name == "option"
        default = each.default if isinstance(each.default, (bool, int, float, str)) else None
        parameters[name] = {
            "is": each.param_type_name,
            "required": each.required,
            "default": default,
            "takes": "nothing" if is_option and each.is_flag else "a value",
        }
    helped = (command.help or "").strip().splitlines()
    return {"parameters": parameters, "help": helped[0] if helped else ""}


def _variables() -> list[str]:
    """The variables of the environment that the library names."""
    found: set[str] = set()
    for file in pathlib.Path(dh.__file__).parent.rglob("*.py"):
        found |= set(re.findall(r"\b_?DISTHOOKS_[A-Z_]+\b", file.read_text()))
    return sorted(found)


def documents() -> dict[str, Any]:
    """Keys and types of each ``--json``, of the real commands on small inputs."""
    from typer.testing import CliRunner

    def told(*words: str) -> Any:
        result = CliRunner().invoke(private("app"), [*words, "--json"])
        assert result.exit_code == 0, (words, result.output, result.exception)
        return json.loads(result.stdout)

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "golden_model.py").write_text(MODEL)
        (folder / "hooks.yaml").write_text(HOOKS.replace("FOLDER", name))
        model, hooks, log = f"{name}/golden_model.py:build", str(folder / "hooks.yaml"), folder / "gradients.jsonl"
        stats = [dh.stats.Norm(per_parameter=True), dh.stats.NonFinite()]
        golden_runs._trained(log, {"stats": stats}, bad=True)
        found = {
            "check": told("check", hooks),
            "check --model": told("check", hooks, "--model", model),
            "explain": told("explain", model, "--device", "cpu"),
            "explain with a file": told("explain", model, hooks),
            "report": told("report", str(log)),
        }
        found = {command: _shape(document) for command, document in found.items()}
    return found


def _shape(value: Any) -> Any:
    """Keys and types: of a list, those of all its entries."""
    if isinstance(value, dict):
        shapes = {key: _shape(each) for key, each in value.items()}
        return {key: "seconds" if "seconds" in key else each for key, each in shapes.items()}
    if isinstance(value, list):
        shapes = [_shape(each) for each in value]
        return [each for i, each in enumerate(shapes) if each not in shapes[:i]]
    return golden_runs.kind(value)
