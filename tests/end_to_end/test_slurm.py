"""launch/slurm.sbatch under a stand-in for Slurm: no real sbatch, srun or scontrol has run it.

The stand-ins say what the file may rely on: sbatch runs a copy from another folder, with the variables of a job; srun
starts a command once on each node, here twice on this machine; scontrol tells the nodes, here localhost, and notes
what it was asked.
"""

from __future__ import annotations

import pathlib
import signal
import time

import pytest

from tests.support.jobs.folder import Folder, as_the_truth, command, folder

STAND_INS = {
    "sbatch": """
        while [[ $1 == --* ]]; do shift; done
        copy=$(mktemp -d); cp "$1" "$copy/slurm_script"; export SLURM_SUBMIT_DIR=$PWD; shift; cd "$copy"
        export SLURM_JOB_ID=4711 SLURM_JOB_NODELIST='node[1-2]' SLURM_NNODES=2 SLURM_CPUS_PER_TASK=4
        exec bash ./slurm_script "$@"
    """,
    "srun": """
        while [[ $1 == --* ]]; do options+=("$1"); shift; done
        echo $$ > "$NOTES.srun"
        echo "srun ${options[*]}" >> "$NOTES"
        for node in 0 1; do "$@" & pids+=($!); done
        trap 'kill "${pids[@]}"; exit 143' TERM
        for pid in "${pids[@]}"; do wait "$pid" || exit; done
    """,
    "scontrol": """
        echo "scontrol $*" >> "$NOTES"
        if [[ $1 == show ]]; then printf 'localhost\\nlocalhost\\n'; else kill "$(< "$NOTES.srun")"; fi
    """,
}


@pytest.fixture
def slurm(tmp_path: pathlib.Path) -> dict[str, str]:
    """Variables with which the stand-ins are found."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in STAND_INS.items():
        (place / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (place / name).chmod(0o755)
    return {"STAND_INS": str(place), "NOTES": str(tmp_path / "notes"), "NPROC": "1"}


def _with_stand_ins(line: str) -> str:
    return f'export PATH="$STAND_INS:$PATH"; {line}'


@pytest.mark.full_tier
@pytest.mark.dist
def test_a_job_on_two_nodes(tmp_path: pathlib.Path, slurm: dict[str, str]) -> None:
    place = tmp_path / "work"
    place.mkdir()
    with folder(place) as made:
        made.succeed(_with_stand_ins(command("sbatch")), **slurm)
        as_the_truth(made, run="slurm")
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes == ["scontrol show hostnames node[1-2]", "srun --kill-on-bad-exit=1 --label --cpus-per-task=4"]


def test_before_its_time_is_up_a_job_asks_to_be_queued_again(tmp_path: pathlib.Path, slurm: dict[str, str]) -> None:
    place = tmp_path / "work"
    place.mkdir()
    with folder(place) as made:
        (place / "launch" / "multinode.sh").write_text("#!/bin/bash\necho started\nexec sleep 600\n")
        job = made.start(_with_stand_ins(f"exec {command('sbatch').replace('HOOKS=launch/hooks.yaml ', '')}"), **slurm)
        _until_started(made, tmp_path / "notes")
        job.send_signal(signal.SIGUSR1)
        done = made.wait(job, timeout=200)
        assert "the time is up" in done.output
        assert done.code == 143, "the step was ended by TERM, and its code is passed on"
    assert (tmp_path / "notes").read_text().splitlines()[-1] == "scontrol requeue 4711"


def _until_started(made: Folder, notes: pathlib.Path) -> None:
    deadline = time.monotonic() + 200
    while not (notes.exists() and "srun" in notes.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
