"""The benchmarks run and write what they say they do; the figures of so small a run mean nothing."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.jobs.folder import free_port

pytestmark = pytest.mark.full_tier
sys.path.append(str(ROOT / "benchmarks"))


def run(*command: str, code: int = 0, path: pathlib.Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a script on one thread: on a busy machine several wait for each other longer than they compute."""
    given = os.pathsep.join(filter(None, [str(path), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": given, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def written(name: str, out: pathlib.Path, *options: str, **more: Any) -> dict[str, Any]:
    """What a benchmark writes into ``out``."""
    run(f"benchmarks/{name}.py", *options, "--json", str(out), **more)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture
def out(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "out.json"


def test_every_way_on_a_disk_ran_or_says_why_not_and_gives_the_same_bits(
    out: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    small = ["--directory", str(folder), "--model", "mlp", "--size", "small", "--rounds", "1"]
    found = written("disk", out, *small)
    assert os.listdir(folder) == [], "no file of any way is left"
    results = found["results"]
    ways = "nothing", "torch save_on_cpu", "torch.save, a file a tensor", "disthooks OnDisk"
    assert all({"step_seconds", "added_seconds", "peak_bytes"} <= results[way].keys() for way in ways)
    assert results["trl OffloadActivations"]["not_run"], "it needs an accelerator"
    rows = results | {f"chain, {name}": row for name, row in found["disk_bound"]["results"].items()}
    inexact = {name for name, row in rows.items() if not row.get("gradients_identical", True)}
    assert inexact == {"disthooks Cast(bf16), OnDisk"}
    report = results["disthooks OnDisk"]["report"]
    assert report["moved"] == report["loaded"] > 2**20
    assert report["held"] == 0
    assert all(found["disk"][f"{what}_gb_per_second"] > 0 for what in ("write", "read"))


ABSENT = ("trl OffloadActivations", "torchtune OffloadActivations", "TransformerEngine cpu offload")


def test_every_way_on_a_device_has_figures_or_a_reason(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two models so small that a CPU has them in no time; and the parts of two runs become one."""
    pytest.importorskip("matplotlib")
    sizes = ["--device", "cpu", "--size", "tiny", "--repeats", "1", "--budget", "1000"]
    parts = ["ResNet-152 fp32", "decoder bf16", "statistics", "codecs", "ResNet-152 bf16"]
    found = written("gpu", out, *sizes, "--figures", str(tmp_path / "img"), "--parts", *parts)
    assert found["not_run"] == {}
    images, words = (found["workloads"][name]["rows"] for name in ("ResNet-152 fp32", "decoder bf16"))
    assert {f"disthooks Tiered at {peak} GB" for peak in (5, 10, 20, 30)} <= images.keys()
    assert {"disthooks Tiered at -30%", "disthooks OnCpu around checkpoints"} <= words.keys()
    for rows in (images, words):
        assert not [row for row in rows.values() if "failed" in row]
        silent = {name for name, row in rows.items() if "step_ms" not in row}
        assert all(name in ABSENT or "Recompute" in name for name in silent), silent
        assert all(len(rows[name]["not_run"]) > 10 for name in silent)
    ran = {name: row for name, row in images.items() if "step_ms" in row}
    assert all(row["gradients_identical"] == ("Quantize" not in name) for name, row in ran.items())
    steps = images["disthooks Recompute, OnDevice"]["recomputed_in_steps"]
    assert len(steps) == 3, "two steps before the gradients are compared, and a timed one"
    assert min(steps) == max(steps) > 2**19
    targets = [target for part in found["targets"].values() for target in part]
    assert len(targets) > 20
    assert all(target["met"] in (True, False) or target.get("why") for target in targets)
    drawn = (tmp_path / "img" / "gpu-resnet-152-fp32.svg").read_text()
    assert all(name in drawn for name in ran)
    more = written("gpu", tmp_path / "more.json", "--parts", *sizes[:4], "--add", str(out))
    assert more["workloads"] == found["workloads"]


#: Kinds of trainings that are healthy.
UNUSUAL = ["critic", "frozen_later", "unfrozen_later", "mask_of_infinity", "stochastic_depth", "warm_restarts"]
#: Of each benchmark the options of a small run, and what has to be true of what it writes.
SMALL: dict[str, tuple[list[str], Callable[[dict[str, Any]], bool]]] = {
    "gradients": (
        ["--sizes", "small", "--rounds", "1"],
        lambda found: "disthooks ClipNorm and all statistics" in found["results"]["small"]["added_milliseconds"],
    ),
    "growth": (
        ["--count", "10", "--rounds", "1", "--directory", "FOLDER"],
        lambda found: all(row["moved_bytes"] > 0 and row["growth"] > 0 for row in found["results"].values()),
    ),
    "explain": (
        ["--size", "tiny", "--only", "8B, FSDP2 x 1024", "MemTracker, ResNet-152, batch 256"],
        lambda found: all(row["seconds"] > 0 for row in (found["results"] | found["peers"]).values()),
    ),
    "explain_gpu": (
        ["--device", "cpu", "--size", "tiny", "--only", "llama bf16 flash", "resnet152 fp32"],
        lambda found: [row["saved_off"] for row in found["rows"].values()] == [0, 0],
    ),
    "layer_inputs": (
        ["--size", "small", "--rounds", "1", "--directory", "FOLDER"],
        lambda found: all("disthooks" in batch["ways"] for batch in found["batches"].values()),
    ),
    "faults": (
        ["--faults", "10", "--clean", "100", "--length", "100", "--seed", "1", "--port", "PORT"],
        lambda found: found["false_alarms"] == 0 and found["right"] >= 9,
    ),
    "bits": (["--bits", "6", "--port", "PORT"], lambda found: (found["right"], found["bits"]) == (6, 6)),
    "transient": (
        ["--bits", "6", "--engines", "ddp", "--worlds", "2", "--port", "PORT"],
        lambda found: (found["undone"] == found["seen"] > 2, found["runs_again_without_a_fault"]) == (True, 0),
    ),
    "healthy": (
        ["--kinds", *UNUSUAL, "--sets", "full", "--every", "1", "--draws", "1000", "--port", "PORT"],
        lambda found: (found["kinds"], found["trainings"], found["sentences_that_blame"]) == (6, 12, 0),
    ),
    "clip": (
        ["--threads", "1", "--rounds", "1"],
        lambda found: all(0.2 < each < 5 for each in found["clip_and_step_against_torch"].values()),
    ),
    "spikes": (
        ["--seeds", "1", "--layers", "1", "--width", "16", "--jobs", "2", "--figure", "FOLDER/spikes.svg"],
        lambda found: found["faults"]["rate"]["AdaGC"] != found["faults"]["rate"]["nothing"],
    ),
    "seeing": (
        ["--sizes", "small", "--rounds", "1"],
        lambda found: all(len(row["added_share_of_a_step"]) == 4 for row in found["results"].values()),
    ),
    "fit": (
        ["--size", "small", "--steps", "32", "--figure", "FOLDER/fit.svg"],
        lambda found: all(row["same_loss"] and row["is_kept"] in (True, None) for row in found["results"].values()),
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", SMALL)
def test_it_runs_and_writes(name: str, out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options, is_right = SMALL[name]
    given = [each.replace("FOLDER", str(tmp_path)).replace("PORT", str(free_port())) for each in options]
    found = written(name, out, *given)
    assert is_right(found), found


def test_the_first_command_on_a_gpu_runs_without_one(out: pathlib.Path) -> None:
    found = written("gpu_first", out, "--device", "cpu", "--size", "tiny")
    assert not [name for name, part in found.items() if part.get("failed")]
    assert found["page_locking"]["not_run"] == "only CUDA page-locks"
    assert found["both_ways"]["each_way"] > 0
    for name in ("batch norm, NCHW fp32", "batch norm, channels_last bf16", "decoder, bf16"):
        assert len(found[name]["recomputed_in_steps"]) == 6
        assert min(found[name]["recomputed_in_steps"]) > 0
        assert found[name]["identical_in_steps"] == [True] * 6
    for name in ("transfer", "codecs"):
        tests = found[f"tests/gpu/test_{name}_gpu.py"]
        assert tests["ended"] == "all"
        assert tests["skipped"]["needs a GPU"] > 2


def test_groups_of_tests_end_in_time_and_lose_nothing(tmp_path: pathlib.Path, out: pathlib.Path) -> None:
    tests = tmp_path / "test_slow.py"
    tests.write_text(
        "import signal, time, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_absent(): pytest.importorskip('no_such_package')\n"
        "def test_hangs():\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    time.sleep(600)\n"
    )
    options = ["--device", "cpu", "--jobs", "1", "--limit", "20", "--json", str(out)]
    run("tests/gpu/run.py", *options, "--only", str(tests), "tests/gpu/test_parallel_gpu.py", code=1)
    groups = json.loads(out.read_text())["groups"]
    found = groups[str(tests)]
    assert found["passed"] == 1
    assert list(found["failed"]) == [next(name for name in found["failed"] if name.endswith("test_bad"))]
    assert list(found["skipped"]) == ["could not import 'no_such_package': No module named 'no_such_package'"]
    assert found["ended"] == "no time was left"
    assert groups["tests/gpu/test_parallel_gpu.py"] == {"not_run": "no time was left"}


def test_figures_that_are_kept_are_those_of_the_results(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from figure import charts

    for model in ("resnet152", "transformer"):
        found = json.loads((ROOT / "benchmarks" / "results" / f"disk-{model}.json").read_text())
        (points,) = charts(found).values()
        kept = (ROOT / "docs" / "img" / f"cpu-{model}.svg").read_text()
        assert len(points) > 3
        assert all(name in kept for name, _, _ in points)
        assert "no GPU" in kept


def test_a_benchmark_stands_beside_the_one_of_another_commit(out: pathlib.Path) -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True).returncode:
        pytest.skip("an older commit is needed, and this folder is no checkout of git")
    found = written("before", out, "HEAD", "--only", "overhead", "--turns", "2", "--rounds", "1")
    rows = found["results"]["overhead"]["figures"]
    assert found["results"]["overhead"]["turns"] == 2
    assert "medians: large: disthooks, on disk" in rows
    for row in rows.values():
        assert 0 < row["least"] <= row["ratio"] <= row["most"]
    listed = subprocess.check_output(["git", "-C", str(ROOT), "worktree", "list"], text=True)
    assert "disthooks-before-" not in listed, "the temporary checkout is still registered"


def test_the_faults_that_were_measured_are_those_that_the_docs_name() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "faults.json").read_text())
    assert found["faults"] == 200
    assert found["right"] >= 190
    assert found["clean_steps"] >= 10_000
    assert found["false_alarms"] <= 1
    unusual = json.loads((ROOT / "benchmarks" / "results" / "faults-unusual.json").read_text())["ways"]
    assert [(way["right"], way["faults"], way["false_sentences"]) for way in unusual.values()] == [(26, 26, [])] * 5
    several = json.loads((ROOT / "benchmarks" / "results" / "faults-ways.json").read_text())
    assert several["right"] >= 0.98 * several["faults"]
    assert several["false_sentences"] == several["false_alarms"] == 0
    healthy = json.loads((ROOT / "benchmarks" / "results" / "healthy.json").read_text())
    assert (healthy["kinds"], healthy["trainings"], healthy["sentences_that_blame"]) == (54, 972, 0)
    assert healthy["sentences_about_draws"] <= healthy["steps_drawn"] / 100_000
    assert {way.split("/")[0] for way in several["ways"]} == {"ddp", "fsdp2", "zero2"}
