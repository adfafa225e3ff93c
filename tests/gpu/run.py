"""The tests for a GPU in groups, the most telling first, within a time; what was found is written as it is found.

    make test-gpu                                    # or: python tests/gpu/run.py --limit 540
    python tests/gpu/run.py --only tests/gpu/test_transfer_gpu.py --limit 60
    python tests/gpu/run.py --device sim --only tests/device -- -k growth        # on the simulated accelerator

A group is one command of pytest, without -x. At the end of its time it is interrupted, and what it does not end by
itself soon is killed. Each test's outcome is written to a file when the test ends (``tests/support/outcomes.py``), so
the JSON is right also then. A package that a group needs and that is not installed is a named skip.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
LAWS = "tests/laws"


class Group(NamedTuple):
    """Tests of one command.

    Attributes:
        paths: files and folders.
        share: of the time that is left when it begins, at most.
        jobs: processes that share the device; copies are timed in one alone.
        needs: a package without which nothing of it runs.
        select: a pytest expression.
    """

    paths: tuple[str, ...]
    share: float = 1.0
    jobs: int | None = None
    needs: str = ""
    select: str = ""


def groups() -> dict[str, Group]:
    """In the order of their value."""
    databases = [f"{LAWS}/test_01_exact_every_op.py", f"{LAWS}/test_01_exact_every_module.py"]
    laws = [path for path in _laws() if path not in databases]
    first = [path for path in laws if "01_exact" in path or "05_" in path]
    others = tuple(path for path in laws if path not in first)
    return {
        "transfers": Group(("tests/gpu/test_transfer_gpu.py",), 0.2, 1),
        "codecs": Group(("tests/gpu/test_codecs_gpu.py",), 0.3),
        "gpu": Group(("tests/gpu",), 0.4, select="not test_transfer_gpu and not test_codecs_gpu"),
        "exact": Group(tuple(first), 0.4),
        "device": Group(("tests/device", "tests/unit/saved/test_codecs.py"), 0.5),
        "laws": Group(others, 0.6),
        "every operator and module": Group(tuple(databases), needs="expecttest"),
    }


def _laws() -> list[str]:
    """The files with tests that are marked any_device."""
    found = sorted(path for path in (ROOT / LAWS).glob("test_*.py") if "pytest.mark.any_device" in path.read_text())
    return [f"{LAWS}/{path.name}" for path in found]


class Run:
    """Groups one after the other until the time is over."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin = options, time.monotonic()
        asked = {path: Group((path,)) for path in options.only} or groups()
        self.groups = asked
        self.found: dict[str, Any] = {"device": options.device, "limit_s": options.limit, "groups": {}}

    def left(self) -> float:
        """Seconds."""
        return self.begin + self.options.limit - time.monotonic()

    def all_groups(self) -> bool:
        """Whether nothing failed."""
        for name, group in self.groups.items():
            self.found["groups"][name] = found = self._group(group)
            print(f"-- {name}: {_line(found)}", flush=True)
            self._write()
        return not any(found.get("failed") for found in self.found["groups"].values())

    def _group(self, group: Group) -> dict[str, Any]:
        if group.needs and importlib.util.find_spec(group.needs) is None:
            return {"not_run": f"it needs {group.needs}, which is not installed"}
        if self.left() < 5:
            return {"not_run": "no time was left"}
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcomes = pathlib.Path(folder, "outcomes.jsonl")
            ended = self._pytest(group, outcomes, max(5.0, group.share * self.left()))
            found = counted(outcomes)
        return found | {"ended": ended, "seconds": round(time.monotonic() - begin, 1)}

    def _pytest(self, group: Group, outcomes: pathlib.Path, seconds: float) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.outcomes", "-p", "no:cacheprovider"]
        jobs = group.jobs or self.options.jobs
        if jobs > 1 and importlib.util.find_spec("xdist"):
            command += ["-n", str(jobs), "--dist", "loadfile" if len(group.paths) > 1 else "load"]
        if importlib.util.find_spec("pytest_timeout"):
            command += ["--timeout", "150"]
        command += [*group.paths, *(["-k", group.select] if group.select else []), *self.options.rest]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "DISTHOOKS_OUTCOMES": str(outcomes)}
        if self.options.device != "cpu":
            environment |= {"DISTHOOKS_DEVICE": self.options.device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        environment.setdefault("OMP_NUM_THREADS", "2")
        with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return _end(process)
            finally:
                if process.poll() is None:
                    _end(process)
        return "all" if code in (0, 1, 5) else f"pytest returned {code}"  # 5: no test was selected

    def _write(self) -> None:
        if self.options.json:
            temporary = self.options.json.with_suffix(".part")
            temporary.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self.found, indent=1) + "\n")
            os.replace(temporary, self.options.json)


def _end(process: subprocess.Popen[bytes]) -> str:
    """Interrupt pytest, so that it prints what failed; kill it and its workers if that does not help."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return "no time was left"


def counted(outcomes: pathlib.Path) -> dict[str, Any]:
    """Counts, names of what failed, reasons of what was skipped with their counts, and the slowest tests."""
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be cut
    by = collections.Counter(row["outcome"] for row in rows)
    slowest = sorted(rows, key=lambda row: -row["seconds"])[:5]
    return {
        "passed": by["passed"],
        "failed": {row["test"]: row["why"] for row in rows if row["outcome"] == "failed"},
        "skipped": dict(collections.Counter(row["why"] for row in rows if row["outcome"] == "skipped")),
        "slowest_s": {row["test"]: row["seconds"] for row in slowest},
    }


def _line(found: dict[str, Any]) -> str:
    if "not_run" in found:
        return f"not run: {found['not_run']}"
    skipped = sum(found["skipped"].values())
    return f"{found['passed']} passed, {len(found['failed'])} failed, {skipped} skipped, ended: {found['ended']}"


def main() -> None:
    """Run, print, write; the exit code is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all")
    parser.add_argument("--jobs", type=int, default=6, help="processes that share the device, where pytest-xdist is")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATH", help="these alone, each a group")
    parser.add_argument("--groups", action="store_true", help="print the groups' files and stop")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("rest", nargs="*", help="after --: for pytest")
    options = parser.parse_args()
    if options.groups:
        for name, group in groups().items():
            print(f"{name}:", *group.paths)
        return
    sys.exit(0 if Run(options).all_groups() else 1)


if __name__ == "__main__":
    main()
