"""One unchanged script and one hooks.yaml under every launcher: the same losses, the same statistics, bytes moved."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import runpy
import sys

import pytest

from tests.support.jobs.started import RECORDED, ROOT, SCRIPTS, TORCHRUN, Job, job

pytestmark = pytest.mark.dist
TRAIN = SCRIPTS / "train.py"
HOOKS = """
save:
  - modules: "blocks.*"
    store: {kind: OnDisk, directory: FOLDER}
watch:
  every: 1
  rules: [{kind: ClipNorm, max_norm: 0.3}]
  stats: [{kind: Norm}, {kind: MaxAbs}, {kind: Spread}]
  sinks: [{kind: Jsonl, path: log.jsonl}]
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: 'no'
num_machines: 1
num_processes: 2
main_process_port: 0
"""
SAME = "grad_norm", "grad_norm_clipped", "clip_ratio", "grad_max_abs"
CLIPPED = "--clip", "0.3"  # the truth clips with torch, as the rule of the file does in the others


@pytest.fixture(scope="module")
def truth() -> list[float]:
    """The losses of one process without disthooks, which clips by itself."""
    said, argv = io.StringIO(), sys.argv
    sys.argv = [str(TRAIN), "--engine", "plain", *CLIPPED]
    try:
        with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
            for name in ("RANK", "WORLD_SIZE"):
                patch.delenv(name, raising=False)
            runpy.run_path(str(TRAIN), run_name="__main__")
    finally:
        sys.argv = argv
    return [json.loads(line)["loss"] for line in said.getvalue().splitlines()]


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("hooks") / "hooks.yaml"
    file.write_text(HOOKS.replace("FOLDER", str(file.parent)))
    return file


@pytest.fixture(scope="module")
def alone(hooks: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job(
        [sys.executable, "-m", RECORDED, "--hooks", hooks, TRAIN, "--engine", "plain"], tmp_path_factory.mktemp("alone")
    )


def proven(done: Job, truth: list[float], alone: Job, ranks: int, models: int = 1, near: float = 1e-12) -> None:
    """The same losses as without disthooks, the same statistics as in one process, and bytes moved on every rank."""
    assert done.code == 0, done.err
    assert done.losses == pytest.approx(truth * models, rel=near)
    logged = sorted(done.logged(), key=lambda record: (record.get("optimizer", 0), record["step"]))
    assert [record["step"] for record in logged] == list(range(len(truth))) * models
    assert any(record["clip_ratio"] < 1 for record in logged)
    for mine, theirs in zip(logged, alone.logged() * models, strict=True):
        assert [mine[name] for name in SAME] == pytest.approx([theirs[name] for name in SAME], rel=near), mine["step"]
        assert mine["grad_norm/max_rank"] > 0  # each rank's own gradients were seen, from the first backward on
    records = done.records()
    assert len(records) == ranks
    for record in records:
        assert not record["failed"]
        assert len(record["attached"]) == models
        assert all(one["saved"]["moved"] > 0 and one["watched"]["steps"] == len(truth) for one in record["attached"])
    assert done.err.count("disthooks: ") == 2 * models  # of each when it is attached and at the end, on one rank


def test_python(truth: list[float], alone: Job) -> None:
    proven(alone, truth, alone, ranks=1)
    first = alone.lines()[0]
    assert first["main"] == "__main__"
    assert first["file"] == str(TRAIN)
    assert first["argv"] == [str(TRAIN), "--engine", "plain"]
    assert first["path"] == str(SCRIPTS)


def test_torchrun_with_every_engine(
    truth: list[float], alone: Job, hooks: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "disthooks.yaml").write_text(hooks.read_text())
    options = ["--nproc-per-node", 2, "--log-dir", "logs", "-t3"]
    traps = ["--run", "x", "--config_file", "y", "-m", "z", "--", "-"]
    words = [*TORCHRUN, *options, "-m", "--", RECORDED, TRAIN, "--engine", "ddp,fsdp1,fsdp2", *traps]
    done = job(words, tmp_path)
    untold = Job(done.code, done.out.replace("[default0]:", ""), done.err, tmp_path)  # what -t puts in front
    proven(untold, truth, alone, ranks=2, models=3)
    assert untold.lines()[0]["argv"] == [str(TRAIN), "--engine", "ddp,fsdp1,fsdp2", *traps]
    assert [one["engine"] for one in done.records()[1]["attached"]] == ["DDP", "FSDP1", "FSDP2"]
    logs = [path.read_text() for path in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert len(logs) == 2
    assert sum('"loss"' in log for log in logs) == 1  # the first rank prints


def test_accelerate_launch(truth: list[float], alone: Job, hooks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.yaml").write_text(ACCELERATE)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "mine.yaml"]
    command = [*launch, "-m", RECORDED, "--hooks", hooks, "-m", "train", "--engine", "accelerate", "-m", "z"]
    done = job(command, tmp_path, ACCELERATE_USE_CPU="true", PYTHONPATH=f"{SCRIPTS}{os.pathsep}{ROOT}")
    proven(done, truth, alone, ranks=2)
    assert done.lines()[0]["argv"] == [str(TRAIN), "--engine", "accelerate", "-m", "z"]
    assert f"disthooks: {hooks}: attached to " in done.err


@pytest.mark.full_tier
def test_deepspeed(truth: list[float], alone: Job, hooks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    options = ["--num_gpus", 2, "--master_port", 29600 + os.getpid() % 300, "--module", RECORDED]
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", *options]
    done = job([*launch, TRAIN, "--engine", "deepspeed", "--run", "x"], tmp_path, DISTHOOKS_CONFIG=str(hooks))
    proven(done, truth, alone, ranks=2, near=1e-6)  # DeepSpeed computes in float32
    assert done.lines()[0]["argv"] == [str(TRAIN), "--local_rank=0", "--engine", "deepspeed", "--run", "x"]
    assert done.records()[1]["attached"][0]["engine"] == "DeepSpeed"


@pytest.mark.full_tier
def test_a_script_that_reduces_gradients_itself_goes_on(tmp_path: pathlib.Path) -> None:
    import accelerate.test_utils

    (tmp_path / "disthooks.yaml").write_text("watch: {every: 1, stats: [{kind: Norm}]}")
    script = pathlib.Path(accelerate.test_utils.__file__).parent / "scripts" / "test_sync.py"
    command = [*TORCHRUN, "--nproc-per-node=2", "-m", RECORDED, script]
    done = job(command, tmp_path, ACCELERATE_USE_CPU="true")
    assert done.code == 0, done.err
    assert done.err.count("is left alone: nothing is attached to its model") == 1
    assert all(len(one["left_alone"]) == 1 and one["attached"] for one in done.records())


MULTI_CPU = ACCELERATE.replace("MULTI_GPU", "MULTI_CPU") + "use_cpu: true\n"


def test_one_process_of_several_says_that_it_is_alone(hooks: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.yaml").write_text(MULTI_CPU.replace("main_process_port: 0", "main_process_port: 29511"))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "mine.yaml", "-m", "disthooks.run"]
    done = job([*command, TRAIN, "--engine", "accelerate"], tmp_path, DISTHOOKS_CONFIG=str(hooks))
    assert done.code == 0, done.err
    assert "disthooks: WARNING: accelerate was told to start several processes and started this one alone" in done.err
