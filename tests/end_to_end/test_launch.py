"""``disthooks launch`` when something goes wrong: the first real error, exit codes, signals, and no process left."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import select
import signal
import time

import pytest
import torch

from disthooks.errors import UsageError
from disthooks.run.launcher import command, failure_report
from disthooks.run.launcher.main import _several_on_cpus, main
from disthooks.run.launcher.worker import Command, configuration
from tests.support.jobs.started import LAUNCH, ROOT, RUN, SCRIPTS, ended, job, left, start

pytestmark = pytest.mark.dist
FAILS = SCRIPTS / "fails.py"
HOOKS = "watch: {stats: [{kind: Norm}]}"
TWO = ("torchrun", "--nproc-per-node", 2)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "disthooks.yaml").write_text(HOOKS)
    return tmp_path


def test_a_stopped_rank_says_where_its_script_was_also_if_another_thread_got_the_signal() -> None:
    stack = """Thread 0x01 (most recent call first):
  File "/job/train.py", line 7 in waits
  File "/job/train.py", line 9 in <module>

Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
"""
    assert failure_report._script_line(stack) == ", at /job/train.py:7 in waits"
    both = stack + '  File "/job/loader.py", line 3 in load\n'
    assert failure_report._script_line(both) == ", at /job/loader.py:3 in load"


def test_a_rank_that_raises_and_after_a_restart_one_that_is_killed(folder: pathlib.Path) -> None:
    command = [*LAUNCH, *TWO, "--max-restarts", 1, FAILS, "raises", "killed"]
    done = job(command, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert done.code == 1  # torchrun's
    said = done.story()
    assert "rank 1" in said.splitlines()[0]
    assert "the first error" in said.splitlines()[0]
    assert "killed from outside (SIGKILL: out of memory?)" in said
    assert "saw another rank go" in said or "was stopped by the launcher (SIGTERM)" in said
    assert "fails.py" in said.split("rank 0")[1]  # and where it was
    assert "attempt 0, before a restart: rank 1" in said
    assert "KeyError: 'the batch of this rank'" in said
    attempts = {(one["attempt"], one["rank"]): one for one in done.records()}
    assert set(attempts) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert attempts[0, 1]["traceback"].splitlines()[1].endswith("in <module>")  # nothing of disthooks in it
    assert str(FAILS) in attempts[0, 1]["traceback"].splitlines()[1]
    assert "the batch of this rank" in done.err[: -len(said)]  # torchrun's own report has it too: @record
    assert left(folder) == []


def test_deepspeed_passes_the_exit_code_on(folder: pathlib.Path) -> None:
    options = ["--num_gpus", 2, "--master_port", 29900 + os.getpid() % 90]
    done = job([*LAUNCH, "deepspeed", *options, FAILS, "exits"], folder)
    assert done.code == 3
    assert "rank 1" in done.story()
    assert "it ended with exit code 3" in done.story()
    assert "was stopped by the launcher (SIGTERM), at" in done.story()
    assert left(folder) == []


@pytest.mark.full_tier
def test_accelerate_and_one_process(folder: pathlib.Path) -> None:
    elastic = folder / "error.json"
    done = job([*LAUNCH, "--num_processes", 1, "--cpu", FAILS, "raises"], folder, TORCHELASTIC_ERROR_FILE=str(elastic))
    assert done.code == 1
    message = json.loads(elastic.read_text())["message"]  # as torch's @record writes it
    assert message["message"] == "KeyError: 'the batch of this rank'"
    assert message["extraInfo"]["py_callstack"].startswith("Traceback")
    assert "rank 0" in done.story()
    assert "KeyError: 'the batch of this rank'" in done.story()


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_a_signal_reaches_the_ranks_and_nobody_is_left(folder: pathlib.Path, number: signal.Signals) -> None:
    process = start([*LAUNCH, *TWO, FAILS, "waits"], folder)
    _ready(folder, 2)
    assert len(left(folder)) >= 3  # the launcher and two ranks
    process.send_signal(number)
    done = ended(process, folder)
    assert done.code not in (0, 2)
    assert done.out.count("waits") == 2  # came as it was printed
    assert left(folder) == []
    assert f"disthooks: {number.name} ended the job" in done.err
    assert done.err.count("was stopped by the launcher (SIGTERM), at") == 2
    assert {one.fate for one in failure_report.read(folder / "records")} == {"stopped"}


def _ready(folder: pathlib.Path, ranks: int) -> None:
    deadline = time.monotonic() + 200
    while len(list(folder.glob("ready.*"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.1)


def test_a_job_in_the_background_is_interrupted(folder: pathlib.Path) -> None:
    """A shell starts it with SIGINT ignored, and accelerate's launcher has no handler of its own."""
    ignored = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *LAUNCH, "--num_processes", 1, "--cpu", FAILS, "waits"]
    process = start(ignored, folder)
    _ready(folder, 1)
    process.send_signal(signal.SIGINT)
    done = ended(process, folder)
    assert done.code == 130
    assert "disthooks: SIGINT ended the job" in done.err
    assert "was interrupted (SIGINT), at" in done.err
    assert left(folder) == []


def test_nohup_is_heeded(folder: pathlib.Path) -> None:
    process = start(["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *LAUNCH, *TWO, FAILS, "waits"], folder)
    _ready(folder, 2)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert "disthooks: SIGTERM ended the job" in ended(process, folder).err
    assert left(folder) == []


def test_a_faulty_configuration_starts_nothing(folder: pathlib.Path) -> None:
    (folder / "disthooks.yaml").write_text("watch: {stats: [{kind: Nurm}]}")
    for words in ([*LAUNCH, *TWO, FAILS, "waits"], [*RUN, FAILS, "waits"]):
        done = job(words, folder)
        assert done.code == 2
        assert done.err.startswith("disthooks: error: ")
        assert len(done.err.splitlines()) == 1
        assert "did you mean 'Norm'" in done.err
        assert not list(folder.glob("ready.*"))


@pytest.mark.parametrize("hooks", [[], ["--hooks", "disthooks.yaml"]])
def test_a_section_in_accelerates_file_is_refused(
    hooks: list[str], folder: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "a.yaml").write_text("num_processes: 2\ndisthooks:\n  watch: {stats: standard}\n")
    (folder / "a.json").write_text('{"disthooks": {"watch": {}}}')
    for file in ("a.yaml", "a.json"):
        assert main([*hooks, "--config_file", file, str(FAILS)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"disthooks: error: {file}: accelerate refuses a file with the key 'disthooks'")
        assert "disthooks launch --hooks hooks.yaml" in said


@pytest.mark.full_tier(command=([*LAUNCH, *TWO], [*LAUNCH, "--cpu"]))
@pytest.mark.parametrize("command", [[*LAUNCH, *TWO], [*LAUNCH, "--cpu"], RUN])
def test_a_missing_script_is_said_before_a_missing_configuration(command: list[object], tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").touch()
    done = job([*command, "trian.py"], tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"disthooks: error: there is no script 'trian.py' in {tmp_path}; did you mean 'train.py'?\n"
    done = job([*command, "-m", "trian.py"], tmp_path)
    assert "there is no module 'trian.py'" in done.err
    done = job([*command, "train.py"], tmp_path)
    assert "there is no configuration" in done.err


@pytest.mark.parametrize("before", [["--hooks", "a.yaml", "torchrun"], ["torchrun", "--hooks=a.yaml"]])
def test_hooks_are_named_before_the_script(before: list[str]) -> None:
    for argv in ([*before, "--nproc-per-node", "2"], [*before, "--nproc-per-node=2", "--"]):
        found = command.read([*argv, "train.py", "--hooks", "mine"])
        assert (found.hooks, found.script, found.args) == ("a.yaml", "train.py", ("--hooks", "mine"))
        assert not any("hooks" in word for word in found.options)
    assert command.read(["torchrun", "train.py", "--hooks", "mine"]).hooks is None
    with pytest.raises(UsageError, match="--hooks needs the path of a file"):
        command.read(["torchrun", "--hooks"])


@pytest.mark.parametrize(
    ("kind", "has_gpu", "on_cpus"),
    [("MULTI_CPU", False, True), ("MULTI_CPU", True, True), ("", False, True), ("", True, False), ("NO", False, False)],
)
def test_only_jobs_for_cpus_are_started_on_cpus(
    kind: str, has_gpu: bool, on_cpus: bool, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    (folder / "a.yaml").write_text("num_processes: 2\n" + (f"distributed_type: '{kind}'\n" if kind else ""))
    asked = command.read(["--config_file", str(folder / "a.yaml"), str(FAILS)])
    launch, variables = _several_on_cpus(asked)
    assert ("--multi_gpu" in launch.options, variables) == (on_cpus, {"ACCELERATE_USE_CPU": "true"} if on_cpus else {})


@pytest.mark.parametrize("argv", [[], ["torchrun", "--nproc-per-node", "2"], ["torchrun", "--nonsense", "1", "a.py"]])
def test_what_is_no_command_line(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="no script"):
        command.read(argv)


@pytest.mark.parametrize(
    ("argv", "options", "script", "args"),
    [
        ("torchrun --standalone --nproc-per-node=2 a.py --run x", "--standalone --nproc-per-node=2", "a.py", "--run x"),
        ("torchrun --stand -r3 -t 3 a.py -m --", "--stand -r3 -t 3", "a.py", "-m --"),
        ("torchrun --nproc-per-node 2 -- a.py --nnodes 3", "--nproc-per-node 2", "a.py", "--nnodes 3"),
        ("torchrun -m pkg.train -m x", "-m", "pkg.train", "-m x"),
        ("--cpu --config_file c.yaml a.py --config_file d", "--cpu --config_file c.yaml", "a.py", "--config_file d"),
        ("accelerate launch --num-processes=2 -m a.b -x", "--num-processes=2 -m", "a.b", "-x"),
        ("deepspeed --num_gpus 2 --module a.b --deepspeed", "--num_gpus 2 --module", "a.b", "--deepspeed"),
        ("deepspeed -H hosts --no_local_rank a.py --no y", "-H hosts --no_local_rank", "a.py", "--no y"),
    ],
)
def test_everything_after_the_script_is_the_scripts(argv: str, options: str, script: str, args: str) -> None:
    found = command.read(argv.split())
    assert (" ".join(found.options), found.script, " ".join(found.args)) == (options, script, args)
    line = command.launcher_arguments(found, None)
    assert line[-len(found.args) - 2 :] == ["-m" if found.module else "--", script, *found.args]
    again = command._parser(found.launcher)(line)  # and the launcher reads it so
    words = vars(again)
    assert (words.get("training_script") or words.get("user_script")) == "disthooks.run"
    assert again.module


def test_the_configuration_of_deepspeed_is_found_among_the_arguments(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"train_batch_size": 8, "disthooks": {"watch": {"stats": [{"kind": "Norm"}]}}}))
    for args in (["--deepspeed", str(file)], [f"--deepspeed_config={file}"]):
        found = configuration(Command("train.py", args=tuple(args)))
        assert found.source == {"watch": {"stats": [{"kind": "Norm"}]}}
    assert configuration(Command("train.py", args=(str(file),), hooks="mine.yaml")).source == "mine.yaml"


def rank(number: int, **values: object) -> dict[str, object]:
    return {"rank": number, "attempt": 0, "host": "a", "pid": 100 + number, "started": 0.0, **values}


def test_the_first_error_is_not_the_first_that_is_seen() -> None:
    lost = {"kind": "exception", "exception": "DistBackendError", "traceback": "T"}
    peers = [failure_report.Rank(rank(i, ended=1.0, message="NCCL communicator was aborted", **lost)) for i in (0, 1)]
    real = failure_report.Rank(rank(2, ended=5.0, kind="exception", exception="KeyError", message="x", traceback="T"))
    gone, crashed = (
        failure_report.Rank(rank(3)),
        failure_report.Rank(rank(4), "Fatal Python error: Segmentation fault\n"),
    )
    later = failure_report.Rank(rank(5, ended=6.0, kind="exit", code=3))
    assert failure_report.first_failure([*peers, gone, later, real]) is real
    assert failure_report.first_failure([*peers, gone]) is gone  # nobody else says why
    assert failure_report.first_failure([*peers, later, crashed]) is crashed  # it had no time to tell the time
    assert failure_report.first_failure(peers) is peers[0]
    assert failure_report.first_failure([failure_report.Rank(rank(0, ended=1.0, kind="finished"))]) is None
    told = failure_report.tell([*peers, crashed])
    assert "Segmentation fault" in told
    assert "rank 1 (host a, pid 101): saw another rank go: DistBackendError" in told


def test_a_socket_of_the_scripts_own_is_an_error_and_who_was_stopped_is_not_first() -> None:
    def rank(number: int, stack: str = "", **values: object) -> failure_report.Rank:
        return failure_report.Rank(
            {"rank": number, "attempt": 0, "host": "a", "pid": 1, "traceback": "", **values}, stack
        )

    stopped = rank(0, stack="Current thread 0x1")
    for name, fate in (("ConnectionResetError", "failed"), ("RuntimeError", "lost a peer")):
        raised = rank(1, ended=2.0, kind="exception", exception=name, message="Connection reset by peer")
        assert raised.fate == fate
        assert failure_report.first_failure([stopped, raised]) is raised


def test_a_script_reads_the_terminal_and_ctrl_c_ends_it(folder: pathlib.Path) -> None:
    script = """
import time
try:
    print('got', input('name?'), flush=True)  # the answer is there before this line is over
    for _ in range(6000):  # the kernel may give a signal to another thread, and then this one sleeps on
        time.sleep(0.1)
except KeyboardInterrupt:
    time.sleep(2)  # longer than accelerate's launcher waits: a checkpoint that is being written
    print('kept', flush=True)
    raise
"""
    (folder / "asks.py").write_text(script)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(ACCELERATE_USE_CPU="true", PYTHONPATH=str(ROOT))
        os.execv(LAUNCH[0], [*LAUNCH, "--cpu", "--num_processes", "1", "asks.py"])
    said, answers, until = b"", [(b"name?", b"bob\n"), (b"got bob", b"\x03")], time.monotonic() + 240
    try:
        while time.monotonic() < until:
            if select.select([terminal], [], [], 0.2)[0]:
                said += os.read(terminal, 4096)
            if answers and answers[0][0] in said:
                os.write(terminal, answers.pop(0)[1])
    except OSError:  # it is over
        pass
    finally:
        os.close(terminal)
        ended, status = os.waitpid(pid, os.WNOHANG if time.monotonic() >= until else 0)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert not answers, said.decode()
    assert b"kept" in said, said.decode()
    assert b"SIGINT ended the job" in said, said.decode()
    assert os.waitstatus_to_exitcode(status) == 130


def test_a_process_that_dies_while_python_closes(folder: pathlib.Path) -> None:
    """As with gloo's threads (docs/upstream/index.md): the script is done, and then the process ends with SIGABRT."""
    script = folder / "closes.py"
    script.write_text("import atexit, os\natexit.register(os.abort)\nprint('done')\n")
    done = job([*LAUNCH, "torchrun", "--nproc-per-node", 1, script], folder)
    assert done.code == 1
    assert "done" in done.out
    assert {one["kind"] for one in done.records()} == {"finished"}
    assert "every rank's script was done: a process died while Python closed" in done.story()
    assert "destroy_process_group()" in done.story()
