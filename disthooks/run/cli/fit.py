"""``disthooks fit``: a hooks file that keeps a step within a budget of memory, from a prediction alone."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import typer

from disthooks.errors import UsageError
from disthooks.run.cli.output import document, line, progress, size


def fit(
    model: str = typer.Argument(..., help="package.module:function or file.py:function, returning (module, inputs)."),
    budget: str = typer.Option(..., help="What one step may have in use on the device: 62GiB."),
    device: str = typer.Option("cuda", help="Whose operators run: cuda (as on an H100), cpu, or a GPU's name."),
    dtype: str | None = typer.Option(None, help="Convert the model to this dtype, such as bf16."),
    autocast: str | None = typer.Option(None, help="Run the forward under autocast to this dtype."),
    optimizer: str | None = typer.Option(None, help="Add the step of this optimizer, such as adamw."),
    engine: str | None = typer.Option(None, help="ddp, fsdp1, fsdp2, hsdp, tp, fsdp2+tp, or zero0 to zero3."),
    world: int = typer.Option(1, min=1, help="The number of ranks."),
    batch: int | None = typer.Option(None, min=1, help="The batch size of one rank."),
    seq: int | None = typer.Option(None, min=1, help="The length of a sequence."),
    measured: str | None = typer.Option(None, help="What `disthooks env --json` has printed: how fast bytes move."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """PRINT a hooks file with which one training step of the model stays within a budget, at the least added time.

    It needs no GPU: nothing runs. The file says how many saved tensors stay on the device, and where the others go.
    Read it, change it, and give it to a run. To let a run find that number itself, write fit: true beside budget.
    """
    with progress(3) as begin:
        begin("importing torch and the model")
        from disthooks._tensors import parse_bytes
        from disthooks.predict.answers.advice import Speeds
        from disthooks.predict.answers.within import plan_within
        from disthooks.predict.explain import explain as predict
        from disthooks.predict.fake.builder import Builder
        from disthooks.run.cli.workload import find

        limit = parse_bytes(budget, "--budget")
        speeds = None if measured is None else Speeds.of(_measured(measured))
        builder = Builder(find(model), name=model)
        begin("predicting one step")
        said = predict(
            builder,
            optimizer=optimizer,
            engine=engine,
            world=world,
            device=device,
            dtype=dtype,
            autocast=autocast,
            batch=batch,
            seq=seq,
        )
        begin("trying plans")
        found = plan_within(builder, said, limit, functools.partial(begin, is_step=False), speeds)
    if as_json:
        plan = None if found is None else found.to_dict()
        document({"model": model, "budget": limit, "peak": said.peak_bytes, "plan": plan})
    elif found is None:
        line(f"# {model} needs {size(said.peak_bytes)}, which is within {size(limit)}: no plan is needed")
    else:
        line(f"# {model} within {size(limit)}: {found.title}.")
        line(f"# Predicted: {found.text}.")
        if device == "cpu":
            line("# This counts tensors. A budget of dh.fit on a CPU counts the whole process, libraries too.")
        for each in found.yaml.rstrip().splitlines():
            line(each)


def _measured(file: str) -> dict[str, Any]:
    """The document in ``file``."""
    try:
        found = json.loads(pathlib.Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--measured={file!r}: {error}; give what disthooks env --json has printed") from None
    if not isinstance(found, dict) or "directories" not in found:
        raise UsageError(f"--measured={file!r}: it is not what disthooks env --json prints")
    return found
