"""The benchmarks run and write what they say they do; the figures of so small a run mean nothing."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
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


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one small round on a disk wrote."""
    folder = tmp_path_factory.mktemp("bench")
    small = ["--directory", str(folder), "--model", "mlp", "--size", "small", "--rounds", "1"]
    found = written("disk", folder / "out.json", *small)
    assert sorted(os.listdir(folder)) == ["out.json"], "no file of any way is left"
    return found


def test_every_way_ran_or_says_why_not(figures: dict[str, Any]) -> None:
    ways = "nothing", "torch save_on_cpu", "torch.save, a file a tensor", "disthooks OnDisk"
    assert figures["results"].keys() >= {*ways, "trl OffloadActivations", "disthooks Cast(bf16), OnDisk"}
    assert all({"step_seconds", "added_seconds", "peak_bytes"} <= figures["results"][way].keys() for way in ways)
    assert figures["results"]["trl OffloadActivations"]["not_run"], "it needs an accelerator"
    targets = figures["targets"]
    names = "added_time_against_tutorial", "peak_memory_against_tutorial", "bandwidth_while_the_disk_is_the_bottleneck"
    assert all(targets[name]["met"] in (True, False, None) for name in names)
    assert all(figures["disk"][f"{what}_gb_per_second"] > 0 for what in ("write", "read"))
    assert all(figures["disk_bound"][what]["of_measured"] > 0 for what in ("write", "read"))
    assert figures["limit"].keys() >= {"least_added_seconds", "added_seconds", "distance_seconds"}


def test_bytes_went_to_disk_and_gradients_are_the_same_bits_in_every_exact_way(figures: dict[str, Any]) -> None:
    rows = figures["results"] | {f"chain, {name}": row for name, row in figures["disk_bound"]["results"].items()}
    inexact = {name for name, row in rows.items() if not row.get("gradients_identical", True)}
    assert inexact == {"disthooks Cast(bf16), OnDisk"}
    assert figures["targets"]["gradients_identical"]["met"] is True
    report = figures["results"]["disthooks OnDisk"]["report"]
    assert report["moved"] == report["loaded"] > 2**20
    assert report["held"] == 0
    assert figures["results"]["torch.save, a file a tensor"]["written_bytes_per_step"] > report["moved"]
    assert figures["disk_bound"]["limit"]["moved_bytes"] == 8 * 2**20


def test_the_benchmark_of_gradients_runs(out: pathlib.Path) -> None:
    found = written("gradients", out, "--sizes", "small", "--rounds", "1")["results"]["small"]
    ours = {"disthooks ClipNorm", "disthooks all statistics", "disthooks ClipNorm and all statistics"}
    assert {"torch clip_grad_norm_", "naive statistics", *ours} <= found["added_milliseconds"].keys()
    assert found["not_run"].keys() | found["added_milliseconds"].keys() >= {"lightning grad_norm"}
    assert all(target["met"] in (True, False) for target in found["targets"].values())


@pytest.fixture(scope="module")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, pathlib.Path]:
    """What ``benchmarks/gpu.py`` wrote and printed of two models so small that a CPU has them in no time."""
    folder = tmp_path_factory.mktemp("gpu")
    parts = ["ResNet-152 fp32", "decoder bf16", "statistics", "codecs", "ResNet-152 bf16"]
    sizes = ["--device", "cpu", "--size", "tiny", "--repeats", "1", "--budget", "1000"]
    to = ["--json", str(folder / "gpu.json"), "--figures", str(folder / "img")]
    done = run("benchmarks/gpu.py", *sizes, *to, "--parts", *parts)
    return json.loads((folder / "gpu.json").read_text()), done.stdout, folder


Figures = tuple[dict[str, Any], str, pathlib.Path]
ABSENT = ("trl OffloadActivations", "torchtune OffloadActivations", "TransformerEngine cpu offload")


def test_every_way_on_a_device_has_figures_or_a_reason(on_device: Figures) -> None:
    found, printed, _ = on_device
    assert found["not_run"] == {}
    images, words = (found["workloads"][name]["rows"] for name in ("ResNet-152 fp32", "decoder bf16"))
    assert {f"disthooks Tiered at {peak} GB" for peak in (5, 10, 20, 30)} <= images.keys()
    assert {"disthooks Tiered at -30%", "disthooks OnCpu around checkpoints"} <= words.keys()
    assert images.keys() >= {"disthooks Recompute, OnDevice", "disthooks Recompute, Quantize(4), OnDevice"}
    for rows in (images, words):
        assert list(rows)[-1] == "torch save_on_cpu", "it page-locks most"
        assert not [row for row in rows.values() if "failed" in row]
        silent = {name for name, row in rows.items() if "step_ms" not in row}
        assert all(name in ABSENT or "Recompute" in name for name in silent), silent
        assert all(len(rows[name]["not_run"]) > 10 for name in silent)
        assert all(name in printed for name in rows)


def test_exact_ways_on_a_device_give_the_same_bits_and_others_do_not(on_device: Figures) -> None:
    rows = on_device[0]["workloads"]["ResNet-152 fp32"]["rows"]
    ran = {name: row for name, row in rows.items() if "step_ms" in row}
    assert all(row["gradients_identical"] == ("Quantize" not in name) for name, row in ran.items())
    assert all(0 < row["gradient_error"] < 1 for name, row in ran.items() if "Quantize" in name)
    assert rows["disthooks OnCpu"]["kept_bytes"]["in place"] > 2**20, "what is in the CPU's memory stays there"
    assert rows["disthooks Tiered at 5 GB"]["exact"]


def test_each_target_on_a_device_is_judged_or_says_why_not(on_device: Figures) -> None:
    found, printed, _ = on_device
    targets = [target for part in found["targets"].values() for target in part]
    assert len(targets) > 20
    assert found["codecs"]["GELU, float32"].keys() >= {"Quantize(4)", "Compact()"}
    assert all(target["met"] in (True, False) or target.get("why") for target in targets)
    assert "no figure here means anything" in printed
    assert found["targets"]["statistics"][0]["reached"] == found["statistics"]["share"]


def test_one_attachment_lasts_for_all_steps_of_a_row(on_device: Figures) -> None:
    """Two steps before the gradients are compared, and a timed one; steps of nothing in between are not counted."""
    row = on_device[0]["workloads"]["ResNet-152 fp32"]["rows"]["disthooks Recompute, OnDevice"]
    assert len(row["recomputed_in_steps"]) == 3
    assert min(row["recomputed_in_steps"]) == max(row["recomputed_in_steps"]) > 2**19
    assert row["stored_bytes"] > 0
    assert [step["peak_bytes"] > 0 for step in row["first_steps"]] == [True, True]


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
        assert tests["skipped"]["needs a GPU"] > 5


def test_the_parts_of_two_runs_become_one(out: pathlib.Path, on_device: Figures) -> None:
    sizes = ["--device", "cpu", "--size", "tiny", "--add", str(on_device[2] / "gpu.json")]
    found = written("gpu", out, "--parts", *sizes)
    assert found["workloads"] == on_device[0]["workloads"]
    assert found["targets"].keys() == on_device[0]["targets"].keys()


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
    run("tests/gpu/run.py", *options, "--only", str(tests), "tests/gpu/test_watch_gpu.py", code=1)
    groups = json.loads(out.read_text())["groups"]
    found = groups[str(tests)]
    assert found["passed"] == 1
    assert list(found["failed"]) == [next(name for name in found["failed"] if name.endswith("test_bad"))]
    assert list(found["skipped"]) == ["could not import 'no_such_package': No module named 'no_such_package'"]
    assert found["ended"] == "no time was left"
    assert groups["tests/gpu/test_watch_gpu.py"] == {"not_run": "no time was left"}


def test_the_figure_of_a_device_has_every_way(on_device: Figures, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    from figure import draw

    found, _, folder = on_device
    assert sorted(path.name for path in (folder / "img").iterdir()) == [
        "gpu-decoder-bf16.svg",
        "gpu-resnet-152-bf16.svg",
        "gpu-resnet-152-fp32.svg",
    ]
    (path, *_) = draw(found, tmp_path)
    text = path.read_text()
    assert all(name in text for name, row in found["workloads"]["ResNet-152 fp32"]["rows"].items() if "step_ms" in row)
    assert "no GPU" in text


FAILS = """
import torch
from accelerator import Device
from rows import Bench
from workloads import image
import disthooks as dh

def full(self, tensor):
    raise torch.OutOfMemoryError("no room for a tensor of 1 GiB")

dh.Quantize.encode = full
bench = Bench(Device("cpu"), image("tiny", torch.device("cpu")), 1, lambda: 100.0)
assert "step_ms" in bench.row("nothing")
failed = bench.row("disthooks Quantize(4), OnCpu")
assert failed == {"failed": "OutOfMemoryError: no room for a tensor of 1 GiB"}, failed
assert bench.row("disthooks OnCpu")["gradients_identical"]
bench._took[False] = 1000.0  # of those of others: one that page-locks everything anew must not end ours
assert "step_ms" in bench.row("disthooks Tiered at 5 GB")
late = {"not_run": "no time was left"}
assert bench.row("checkpoint per block") == late
bench._took[False], bench.device.locks_per_s = 0.0, bench._saved[1] / 99.0
assert "step_ms" in bench.row("torch save_on_cpu")
bench._took[False], bench.left = 0.0, lambda: 98.0
assert bench.row("torch save_on_cpu") == late, "page-locking alone takes longer"
bench.left = lambda: 0.0
assert bench.row("checkpoint per block") == late
"""


def test_a_way_that_fails_is_named_and_the_rest_runs() -> None:
    """A process of its own: the benchmarks have a module ``models`` as the laws do."""
    run("-c", FAILS, path=ROOT / "benchmarks")


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


def test_what_the_link_allows() -> None:
    from targets import at_the_link, of_images

    nothing = {"step_ms": 500.0, "forward_ms": 170.0, "backward_ms": 330.0, "peak_bytes": 48e9, "ratio": 1.0}
    nothing |= {"exact": True}
    ours = {"step_ms": 1950.0, "moved_bytes": 45e9, "loaded_bytes": 45e9, "peak_bytes": 4e9, "ratio": 3.9}
    ours |= {"exact": True}
    link = {"to_host": 50e9, "to_device": 50e9}
    rows = {"nothing": nothing, "disthooks OnCpu": ours}
    assert at_the_link(rows, link)["reached"] == {"limit_ms": 1800.0, "of_limit": 1.083}
    assert at_the_link(rows, link)["met"] is True
    assert at_the_link(rows | {"disthooks OnCpu": ours | {"step_ms": 2000.0}}, link)["met"] is False
    four = {"step_ms": 740.0, "peak_bytes": 4.9e9, "ratio": 1.48, "exact": False}
    met = {one["wanted"]: one["met"] for one in of_images(rows | {"disthooks Quantize(4), Tiered at 5 GB": four}, link)}
    assert met["at 5 GB with 4 bits at most 1.5 times nothing"] is True
    assert met["at 10 GB the fastest of all"] is True
    assert met["at 10 GB the fastest of all that lose nothing"] is True


def test_growth_has_the_ratios_of_each_program(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    found = written("growth", out, "--count", "10", "--rounds", "1", "--directory", str(tmp_path))
    assert found["results"].keys() == {"views", "columns", "weight", "mask", "asked"}
    for row in found["results"].values():
        assert row["moved_bytes"] > 0
        assert min(row["growth"], row["growth_with_nothing"], row["ratio_to_nothing"]) > 0


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


def test_ratios_are_taken_turn_by_turn() -> None:
    from before import compared, figures

    before = [{"a": 1.0, "gone": 1.0, "b": 1.0}, {"a": 10.0, "gone": 1.0, "b": 1.0}, {"a": 2.0, "gone": 1.0, "b": 1.0}]
    now = [{"a": 2.0, "b": 1.0}, {"a": 10.0, "b": -0.5}, {"a": 1.0, "b": 1.0}]
    row = compared(before, now)["a"]
    assert compared(before, now).keys() == {"a"}
    assert (row["before"], row["now"], row["ratio"], row["least"], row["most"]) == (2.0, 2.0, 1.0, 0.5, 2.0)
    result = {"results": {"way": {"step_seconds": 2, "gradients_identical": True}}, "machine": {"cores": 2}}
    assert dict(figures(result)) == {"way: step_seconds": 2.0}


def test_explain_is_measured_in_processes_of_its_own(out: pathlib.Path) -> None:
    names = "8B, FSDP2 x 1024", "Llama-3-8B, TP 8", "MemTracker, ResNet-152, batch 256"
    found = written("explain", out, "--size", "tiny", "--only", *names)
    rows = found["results"] | found["peers"]
    assert rows.keys() == set(names)
    assert all(row["seconds"] > 0 and row["resident_gib"] > 0 and row["peak_bytes"] > 0 for row in rows.values())
    assert found["compared"]["MemTracker / explain for a CPU, ResNet-152, batch 256"] == pytest.approx(1, abs=0.05)


def test_what_explain_says_of_a_gpu_is_compared_with_a_real_step(out: pathlib.Path) -> None:
    """On a CPU both are exact."""
    names = "llama bf16 flash", "resnet152 fp32"
    found = written("explain_gpu", out, "--device", "cpu", "--size", "tiny", "--only", *names)
    assert found["summary"]["met"] == found["summary"]["cases"] == 2
    assert [row["saved_off"] for row in found["rows"].values()] == [0, 0]


def test_the_inputs_of_checkpointed_layers_are_moved_in_each_way(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    found = written("layer_inputs", out, "--size", "small", "--rounds", "1", "--directory", str(tmp_path))
    for batch in found["batches"].values():
        assert batch["ways"].keys() == {"inputs stay", "transformers offload=True", "disthooks"}
        # The input of a layer of the short batch is smaller than what a disk is asked to take.
        assert batch["ways"]["disthooks"]["moved_bytes"] == (batch["inputs_bytes"] if batch["rows"] > 1 else 0)


@pytest.mark.dist
def test_faults_in_training_are_named(out: pathlib.Path) -> None:
    """One of each kind on two ranks; which of two copies is wrong cannot always be told."""
    sizes = ["--faults", "10", "--clean", "100", "--length", "100", "--seed", "1", "--port", str(free_port())]
    found = written("faults", out, *sizes)
    assert found["false_alarms"] == 0
    assert found["right"] >= 9, found["failures"]


def test_healthy_trainings_are_blamed_for_nothing(out: pathlib.Path) -> None:
    kinds = ["critic", "frozen_later", "unfrozen_later", "mask_of_infinity", "stochastic_depth", "warm_restarts"]
    port = str(free_port())
    found = written(
        "healthy", out, "--kinds", *kinds, "--sets", "full", "--every", "1", "--draws", "1000", "--port", port
    )
    assert (found["kinds"], found["trainings"], found["ranks"]) == (6, 12, [1, 2])
    assert found["sentences_that_blame"] == 0, found["blames"]
    whole = json.loads((ROOT / "benchmarks" / "results" / "healthy.json").read_text())
    assert (whole["kinds"], whole["trainings"], whole["sentences_that_blame"]) == (54, 972, 0)
    assert whole["sentences_about_draws"] <= whole["steps_drawn"] / 100_000


def test_clipping_beside_torch_is_measured(out: pathlib.Path) -> None:
    ratios = written("clip", out, "--threads", "1", "--rounds", "1")["clip_and_step_against_torch"]
    assert len(ratios) == 8
    assert all(0.2 < each < 5 for each in ratios.values())


def test_induced_spikes_and_their_alarm(out: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A model that is too small for its figures to mean anything: each fault and rule is run, and drawn."""
    sizes = ["--seeds", "1", "--layers", "1", "--width", "16", "--jobs", "2"]
    found = written("spikes", out, *sizes, "--figure", str(tmp_path / "spikes.svg"))
    rows = [row for rules in found["faults"].values() for row in rules.values()]
    assert len(rows) == 15
    assert all(0 <= row["spike_score"] < 1 for row in rows)
    assert found["faults"]["rate"]["AdaGC"] != found["faults"]["rate"]["nothing"]
    assert "steps after the fault" in (tmp_path / "spikes.svg").read_text()


@pytest.mark.dist
def test_flipped_bits_are_named(out: pathlib.Path) -> None:
    found = written("bits", out, "--bits", "6", "--port", str(free_port()))
    assert (found["right"], found["bits"]) == (6, 6), found["wrong"]


def test_the_cost_of_seeing_a_run_is_measured(out: pathlib.Path) -> None:
    (found,) = written("seeing", out, "--sizes", "small", "--rounds", "1")["results"].values()
    assert len(found["added_share_of_a_step"]) == 4


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
    assert {way.split("/")[0] for way in several["ways"]} == {"ddp", "fsdp2", "zero2"}


def test_a_budget_on_the_cpu_is_kept(out: pathlib.Path) -> None:
    figure = out.with_suffix(".svg")
    found = written("fit", out, "--size", "small", "--steps", "32", "--figure", str(figure))["results"]
    assert all(row["same_loss"] for row in found.values())
    assert all(row["is_kept"] for row in found.values() if row["budget_bytes"])
    assert all(f">{name}<" in figure.read_text() for name in ("OnDisk", "torch selective checkpoints", "fit"))
