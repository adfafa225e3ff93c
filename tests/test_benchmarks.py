"""``benchmarks/disk.py`` runs and writes what it says it does; the figures of so small a run mean nothing."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one small round wrote."""
    folder = tmp_path_factory.mktemp("bench")
    script = [sys.executable, str(ROOT / "benchmarks" / "disk.py"), "--directory", str(folder)]
    small = ["--model", "mlp", "--size", "small", "--rounds", "1", "--json", str(folder / "out.json")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # One thread: on a busy machine several wait for each other longer than they compute.
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*script, *small], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(os.listdir(folder)) == ["out.json"], "no file of any way is left"
    return json.loads((folder / "out.json").read_text())


def test_every_way_ran_or_says_why_not(figures: dict[str, Any]) -> None:
    ways = "nothing", "torch save_on_cpu", "torch.save, a file a tensor", "disthooks OnDisk"
    assert figures["results"].keys() >= {*ways, "trl OffloadActivations", "disthooks Cast(bf16), OnDisk"}
    assert all({"step_seconds", "added_seconds", "peak_bytes"} <= figures["results"][way].keys() for way in ways)
    assert figures["results"]["trl OffloadActivations"]["not_run"], "it needs an accelerator"


def test_gradients_are_the_same_bits_in_every_exact_way(figures: dict[str, Any]) -> None:
    rows = figures["results"] | {f"chain, {name}": row for name, row in figures["disk_bound"]["results"].items()}
    inexact = {name for name, row in rows.items() if not row.get("gradients_identical", True)}
    assert inexact == {"disthooks Cast(bf16), OnDisk"}
    assert figures["targets"]["gradients_identical"]["met"] is True


def test_bytes_went_to_disk_and_came_back(figures: dict[str, Any]) -> None:
    report = figures["results"]["disthooks OnDisk"]["report"]
    assert report["moved"] == report["loaded"] > 2**20
    assert report["held"] == 0
    assert figures["results"]["torch.save, a file a tensor"]["written_bytes_per_step"] > report["moved"]
    assert figures["disk_bound"]["limit"]["moved_bytes"] == 8 * 2**20


def test_the_targets_have_figures(figures: dict[str, Any]) -> None:
    targets = figures["targets"]
    names = "added_time_against_tutorial", "peak_memory_against_tutorial", "bandwidth_while_the_disk_is_the_bottleneck"
    assert all(targets[name]["met"] in (True, False, None) for name in names)
    assert all(figures["disk"][f"{what}_gb_per_second"] > 0 for what in ("write", "read"))
    assert all(figures["disk_bound"][what]["of_measured"] > 0 for what in ("write", "read"))
    assert figures["limit"].keys() >= {"least_added_seconds", "added_seconds", "distance_seconds"}


def test_the_benchmark_of_gradients_runs(tmp_path: pathlib.Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "gradients.py"), "--sizes", "small", "--rounds", "1"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    out = tmp_path / "out.json"
    done = subprocess.run(
        [*script, "--json", str(out)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["results"]["small"]
    ours = {"disthooks ClipNorm", "disthooks all statistics", "disthooks ClipNorm and all statistics"}
    assert {"torch clip_grad_norm_", "naive statistics", *ours} <= found["added_milliseconds"].keys()
    assert found["not_run"].keys() | found["added_milliseconds"].keys() >= {"lightning grad_norm"}
    assert all(target["met"] in (True, False) for target in found["targets"].values())
