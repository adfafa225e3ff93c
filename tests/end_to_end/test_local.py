"""launch/local.sh as launch/README.md writes it: hooks without a line in the script, and restarts that restart."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.jobs.folder import as_the_truth, command, folder

pytestmark = pytest.mark.dist


@pytest.mark.full_tier
def test_a_script_as_it_is(tmp_path: pathlib.Path) -> None:
    with folder(tmp_path) as made:
        assert "rank 1 of 2" in made.succeed(command("local.sh", "launch/train.py --engine ddp"))
        as_the_truth(made, clip=None)
        logs = sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / "runs" / "logs").rglob("stdout.log"))
        assert [log.rpartition("attempt_0/")[2] for log in logs] == ["0/stdout.log", "1/stdout.log"]
        again = made.succeed(command("local.sh", "launch/train.py --engine ddp"), NPROC="1", LOGS="")
        assert "checkpoint.pt has all 6 steps already" in again


@pytest.mark.full_tier
def test_hooks_are_attached_and_a_killed_rank_comes_back(tmp_path: pathlib.Path) -> None:
    """Rank 1 is killed (SIGKILL) in its third step; the second life goes on from the checkpoint."""
    with folder(tmp_path) as made:
        output = made.succeed(command("local.sh", "HOOKS", "--die 2"))
        assert "Model on DDP" in output, "what disthooks says at the end"
        assert len(list((tmp_path / "runs" / "logs").glob("*/attempt_1/*/stdout.log"))) == 2
        as_the_truth(made, run="restarted", killed_in=2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("launch/local.sh || exit 2", "launch/local.sh SCRIPT"),
        ("launch/multinode.sh || exit 2", "launch/multinode.sh SCRIPT"),
        ("launch/local.sh none.py", "no script none.py"),
        ("HOOKS=none.yaml launch/local.sh launch/train.py", "no file HOOKS=none.yaml"),
        ("NPROC=none launch/local.sh launch/train.py", "NPROC=none is not a number"),
        ("launch/multinode.sh launch/train.py", "RDZV=host[:port] is missing"),
        ("launch/multinode.sh none.py", "no script none.py"),
        (
            "JOIN_TIMEOUT=1 RDZV=nowhere.invalid launch/multinode.sh launch/train.py",
            "the address of nowhere.invalid:29500 is not known",
        ),
        ("launch/slurm.sbatch", "usage: sbatch launch/slurm.sbatch SCRIPT"),
    ],
)
def test_wrong_use_ends_at_once_and_says_what_is_right(tmp_path: pathlib.Path, line: str, says: str) -> None:
    with folder(tmp_path) as made:
        done = made.run(line)
        assert done.code == 2
        assert says in done.output
