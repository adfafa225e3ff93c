"""``accelerate launch`` with every file of launch/accelerate, and the deepspeed launcher: one truth for all of them.

On the CPU by way of launch/cpu (accelerate and DeepSpeed ask for CUDA); the script, launch/train_accelerate.py, is the
same for all, and hooks.yaml too.
"""

from __future__ import annotations

import pathlib

import pytest
import torch

from tests.support.jobs.folder import as_the_truth, command, folder

pytestmark = pytest.mark.dist


@pytest.mark.full_tier(name=("ddp", "fsdp1", "zero1", "zero2", "zero3"))
@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
def test_accelerate_launch(tmp_path: pathlib.Path, name: str) -> None:
    pytest.importorskip("accelerate")
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    with folder(tmp_path) as made:
        line = command("accelerate launch", "fsdp2.yaml").replace("fsdp2", name)
        output = made.succeed(line)
        assert "attempt_0" in str(list((tmp_path / "runs" / "logs").rglob("stdout.log")))
        kind = {"ddp": "MULTI_GPU", "fsdp1": "FSDP", "fsdp2": "FSDP"}.get(name, "DEEPSPEED")
        assert f"DistributedType.{kind}: loss" in output, "not what it was started for"
        as_the_truth(made)


@pytest.mark.full_tier
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_deepspeed_launcher(tmp_path: pathlib.Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    with folder(tmp_path) as made:
        made.succeed(command("deepspeed --num_gpus", "zero2.json").replace("zero2", f"zero{stage}"))
        as_the_truth(made)


ITSELF = """    from disthooks.integrations.accelerate import prepare

    hooks = prepare(accelerator, model, optimizer, "launch/hooks.yaml")
    args.run"""


UNCHANGED = "-m disthooks.run --hooks launch/hooks.yaml"


@pytest.mark.full_tier
@pytest.mark.parametrize(("how", "strict"), [(UNCHANGED, False), (UNCHANGED, True), ("", False)])
def test_processes_that_accelerate_leaves_alone_are_told(tmp_path: pathlib.Path, how: str, strict: bool) -> None:
    """MULTI_GPU with ``use_cpu: true`` wraps nothing: each process would train by itself, and say that all is well."""
    pytest.importorskip("accelerate")
    with folder(tmp_path) as made:
        file = tmp_path / "launch" / "accelerate" / "ddp.yaml"
        file.write_text(file.read_text().replace("use_cpu: false", "use_cpu: true").replace("bf16", "'no'"))
        script = tmp_path / "launch" / "train_accelerate.py"
        if strict:
            hooks = tmp_path / "launch" / "hooks.yaml"
            hooks.write_text(f"strict: true\n{hooks.read_text()}")
        if not how:
            script.write_text(script.read_text().replace("    args.run", ITSELF, 1))
        done = made.run(f"accelerate launch --config_file {file} {how} {script}")
        assert "ACCELERATE_USE_CPU=true" in done.output
        if how and not strict:
            assert done.code == 0  # somebody else's script goes on, and is told
            assert "is left alone" in done.output
            return
        assert done.code != 0
        assert not (tmp_path / "runs" / "example" / "losses.jsonl").exists(), "before its first step"


#: Accelerator knows two processes, and wraps no model: the machine has no GPU, and it was not told to take the CPU.
KNOWN_AND_ALONE = """
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from disthooks.integrations.accelerate import prepare

accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
prepare(accelerator, model, optimizer, {"watch": {"stats": "standard"}})
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs accelerate wraps the model")
def test_processes_that_accelerate_knows_and_does_not_wrap_are_told(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("accelerate")
    with folder(tmp_path) as made:
        script = tmp_path / "alone.py"
        script.write_text(KNOWN_AND_ALONE)
        done = made.run(f"torchrun --standalone --nproc-per-node 2 {script}")
        assert done.code != 0
        assert "Accelerator(cpu=True)" in done.output
