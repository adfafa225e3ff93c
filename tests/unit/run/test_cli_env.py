"""``disthooks env``: its document, and each thing that would not work."""

from __future__ import annotations

import copy
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import disthooks as dh
from disthooks.run.cli import doctor
from disthooks.run.cli import env as env_command
from disthooks.run.cli.doctor import problems
from tests.support import ROOT
from tests.support.command_line import ENV, hooks, process, run

KEYS = {
    "": "config cpu directories environment link memory problems system torch versions",
    "config": "error missing origin passed_over source",
    "cpu": "there usable",
    "memory": "available_bytes limit_bytes memlock_bytes total_bytes",
    "torch": "backends cuda devices driver hip threads version",
    "directories": "direct error file_system free_bytes in_memory path read_bytes_per_s roles write_bytes_per_s",
}


def test_env_is_a_document(tmp_path: pathlib.Path) -> None:
    """In a process: what is printed besides, and what is left behind, would be found."""
    hooks(tmp_path, "save: []").rename(tmp_path / "disthooks.yaml")
    other = hooks(tmp_path, "save: [{modules: x, store: {kind: OnDisk, directory: {folder}}}]")
    before = sorted(tmp_path.rglob("*"))
    told = {"DISTHOOKS_CONFIG": str(other), "TMPDIR": str(tmp_path)}
    done = process("env", "--json", cwd=tmp_path, env={**ENV, **told})
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert sorted(facts) == KEYS[""].split()
    for name in ("config", "cpu", "memory", "torch"):
        assert sorted(facts[name]) == KEYS[name].split(), name
    (there,) = facts["directories"]
    assert sorted(there) == KEYS["directories"].split()
    assert there["roles"] == ["temporary", "save.0"]
    assert there["write_bytes_per_s"] > 1e6 < there["read_bytes_per_s"]
    assert facts["config"]["source"] == str(other)
    assert "DISTHOOKS_CONFIG" in facts["config"]["origin"]
    assert any("disthooks.yaml" in text for text in facts["config"]["passed_over"])
    assert facts["versions"]["torch"]
    assert facts["versions"]["disthooks"] == dh.__version__
    assert all(set(problem) == {"what", "why", "do"} for problem in facts["problems"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_command, "MOST", env_command._LEAST)


@pytest.mark.usefixtures("quick")
def test_env_for_people(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTHOOKS_CONFIG", "gone.yaml")
    told = run("env").stdout
    assert "\x1b" not in told
    assert max(map(len, told.splitlines())) <= 100
    assert dh.__version__ in told
    assert "would not work" in told[told.index("environment") :]  # problems come last
    assert "gone.yaml" in told


@pytest.mark.usefixtures("quick")
def test_env_of_several_processes_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run("env").stdout == ""
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("RANK", "0")  # a launcher's own number counts
    assert run("env", "--json").stdout.startswith("{")
    for variable in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PMI_RANK", "1")
    assert run("env").stdout == ""


@pytest.mark.dist
def test_env_under_torchrun() -> None:
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "disthooks"]
    done = subprocess.run([*call, "env", "--json"], capture_output=True, text=True, check=True, timeout=300, env=ENV)
    facts = json.loads(done.stdout)
    assert facts["environment"]["WORLD_SIZE"] == "2"


ALONE = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numpy", "yaml", "deepspeed", "accelerate", "transformers", "lightning"}:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
sys.meta_path.insert(0, Refuse())
sys.argv = ["disthooks", "env", "--json"]
from disthooks.run.cli import main
main()
"""


def test_env_needs_nothing_that_is_optional(tmp_path: pathlib.Path) -> None:
    (tmp_path / "disthooks.yaml").write_text("save: []")
    call = [sys.executable, "-W", "ignore", "-c", ALONE]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path, env=ENV)
    assert done.returncode == 0, done.stderr
    found = [problem["why"] + problem["do"] for problem in json.loads(done.stdout)["problems"]]
    assert any("disthooks[config]" in text for text in found)


# -- what would not work

GOOD: dict[str, Any] = {
    "versions": dict.fromkeys(doctor.PACKAGES, "1.0"),
    "torch": {"cuda": None, "driver": None, "devices": [], "backends": ["gloo"]},
    "link": None,
    "directories": [
        {
            "path": "/t",
            "roles": ["temporary"],
            "error": None,
            "in_memory": False,
            "free_bytes": 1 << 40,
            "file_system": "ext4",
        }
    ],
    "config": {"source": "hooks.yaml", "error": None, "missing": []},
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"config": {"error": "hooks.yaml: is not YAML"}}, "is not YAML"),
    ({"config": {"missing": [("WandB", "pip install 'disthooks[wandb]'")]}}, "disthooks[wandb]"),
    ({"versions": {"pydantic": None}}, "pydantic is not installed"),
    ({"directories": {"in_memory": True, "file_system": "tmpfs"}}, "tmpfs is memory"),
    ({"directories": {"free_bytes": 1 << 20}}, "0.00 GB are free"),
    ({"directories": {"file_system": "nfs4"}}, "a network's (nfs4)"),
    ({"directories": {"error": "/t: Permission denied"}}, "Permission denied"),
    ({"link": {"error": "pinned: out of memory"}}, "out of memory"),
    ({"torch": {"cuda": "13.0"}}, "sees no GPU"),
    ({"torch": {"driver": "580.95"}}, "built without CUDA"),
    ({"torch": {"backends": []}}, "no gloo"),
    ({"torch": {"cuda": "13.0", "devices": [{"index": 0}, {"index": 1}]}}, "no nccl"),
]


def _facts(changed: dict[str, Any]) -> dict[str, Any]:
    facts = copy.deepcopy(GOOD)
    for key, value in changed.items():
        if key == "directories":
            facts[key][0].update(value)
        elif isinstance(facts[key], dict):
            facts[key].update(value)
        else:
            facts[key] = value
    return facts


def test_where_all_is_well_nothing_is_told() -> None:
    assert problems(GOOD) == []
    assert problems(_facts({"torch": {"cuda": "13.0", "devices": [{"index": 0}]}})) == []


@pytest.mark.parametrize(("changed", "says"), BAD, ids=[says for _, says in BAD])
def test_what_would_not_work(changed: dict[str, Any], says: str) -> None:
    (found,) = problems(_facts(changed))
    assert says in f"{found.what} {found.why} {found.do}"
    assert found.do


@pytest.mark.usefixtures("quick")
def test_a_directory_that_is_memory_or_is_not_there(tmp_path: pathlib.Path) -> None:
    there = env_command.directory_facts(str(tmp_path), ["temporary"])
    assert there["error"] is None
    assert there["read_bytes_per_s"] > 0
    assert "No such file" in env_command.directory_facts(str(tmp_path / "no"), [])["error"]
    if doctor.file_system("/dev/shm") == "tmpfs":
        assert env_command.directory_facts("/dev/shm", [])["in_memory"]


def test_docs_have_every_key() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    for keys in KEYS.values():
        assert [key for key in keys.split() if f"`{key}`" not in page] == []
