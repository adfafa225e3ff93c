"""What the records of a job say about its end: the first real error, and where everybody else was."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# What a rank says that lost its peer, and not its own way.
_VICTIM = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (timeout|closed)|recvvalue failed|"
    r"sendbytes failed|failed to recv|remote process exited|communicator was aborted|nccl comm.*abort|"
    r"watchdog caught collective|timed out (after )?waiting|gloo.*(pair|timeout)|pair closure|peer.*(gone|exited)|"
    r"application timeout|store.*(timeout|timed out)|its error says why",
    re.IGNORECASE,
)
# What collectives raise. A ConnectionResetError is of a socket of the script's own, a bucket that it reads.
_COLLECTIVE = (
    *("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "NCCLError"),
    *("AttachError", "SystemExit"),
)
_FOREIGN = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/|/disthooks/(run|launching)/")


@dataclass(frozen=True)
class Rank:
    """One worker: its record, and where it stood when it was stopped or crashed."""

    values: dict[str, Any]
    stack: str = ""

    @property
    def ended(self) -> bool:
        """Whether it came to an end of its own."""
        return "ended" in self.values

    @property
    def crashed(self) -> bool:
        """Whether Python died of a signal such as SIGSEGV."""
        return not self.ended and "Fatal Python error" in self.stack

    @property
    def stopped(self) -> bool:
        """Whether somebody sent it SIGTERM."""
        return not self.ended and bool(self.stack) and not self.crashed

    @property
    def killed(self) -> bool:
        """Whether it vanished without a word."""
        return not self.ended and not self.stack

    @property
    def failed(self) -> bool:
        """Whether it raised, or left with an exit code."""
        return self.ended and self.values["kind"] != "finished"

    @property
    def victim(self) -> bool:
        """Whether what it raised is that another rank was gone."""
        if self.stopped or self.values.get("kind") == "interrupted":
            return True
        text = f"{self.values.get('exception')}: {self.values.get('message')}"
        return self.failed and self.values.get("exception") in _COLLECTIVE and bool(_VICTIM.search(text))


def read(folder: pathlib.Path, since: float = 0.0) -> list[Rank]:
    """The workers that were started after ``since``, in order of attempts and ranks."""
    found = []
    for path in sorted(folder.glob("attempt-*.json")):
        values = json.loads(path.read_text())
        stack = path.with_suffix(".stack")
        if values["started"] >= since:
            found.append(Rank(values, stack.read_text() if stack.exists() else ""))
    return sorted(found, key=lambda one: (one.values["attempt"], one.values["rank"]))


def tell(ranks: Sequence[Rank], signals: Sequence[int] = ()) -> str:
    """A short text on a job that failed, or was ended by ``signals``.

    >>> lost = Rank({"rank": 0, "attempt": 0, "host": "a", "pid": 1, "ended": 1.0, "kind": "exception",
    ...              "exception": "RuntimeError", "message": "Connection closed by peer", "traceback": ""})
    >>> bad = Rank({"rank": 1, "attempt": 0, "host": "a", "pid": 2, "ended": 2.0, "kind": "exception",
    ...             "exception": "ValueError", "message": "bad batch", "traceback": "ValueError: bad batch"})
    >>> print(tell([lost, bad]).strip())  # doctest: +ELLIPSIS
    disthooks: rank 1 (host a, pid 2): the first error:
      at ...:02
      ValueError: bad batch
      rank 0 (host a, pid 1): saw another rank go: RuntimeError
    """
    if not ranks:
        return "\ndisthooks: the launcher failed, and no worker had begun; what it says is above\n"
    last = max(one.values["attempt"] for one in ranks)
    now = [one for one in ranks if one.values["attempt"] == last]
    lines = ["", *(_ended(now, signals) or _first(now)), *_earlier(ranks, last)]
    return "\n".join(lines) + "\n"


def _ended(ranks: Sequence[Rank], signals: Sequence[int]) -> list[str]:
    """Of a job that was told to end, where everybody was; nothing if it was not, or a rank had failed by itself."""
    found = first(ranks)
    if found is not None and found.values.get("kind") == "interrupted":
        signals = signals or [signal.SIGINT]  # the terminal told the launcher itself
    if not signals or (found is not None and not found.victim and not found.killed):
        return []
    names = ", ".join(dict.fromkeys(signal.Signals(number).name for number in signals))
    return [f"disthooks: {names} ended the job", *(f"  {_who(one)}: {_short(one)}" for one in ranks)]


def _first(ranks: Sequence[Rank]) -> list[str]:
    found = first(ranks)
    if found is None:
        return ["disthooks: the launcher failed, and no rank says of an error", *_after_the_end(ranks)]
    others = [one for one in ranks if one is not found]
    said = [f"disthooks: {_who(found)}: the first error:", *_what(found)]
    return [*said, *(f"  {_who(one)}: {_short(one)}" for one in others)]


def _after_the_end(ranks: Sequence[Rank]) -> list[str]:
    """What may end a process whose script was done; docs/upstream.md has the fault of torch that is meant."""
    if not all(one.values.get("kind") == "finished" for one in ranks):
        return []
    return [
        "  every rank's script was done: a process died while Python closed. Under gloo, exit code -6 (SIGABRT) means",
        "  a collective that nobody waited for: end the script with torch.distributed.destroy_process_group()",
    ]


def first(ranks: Sequence[Rank]) -> Rank | None:
    """The rank whose error came first; those that only saw another one go come after all others.

    A rank that raised comes before one that vanished: launchers kill what does not end in time. One that was stopped
    comes last: somebody had a reason to stop it.
    """

    def order(rank: Rank) -> tuple[int, float]:
        own = rank.crashed or (rank.failed and not rank.victim)
        return 0 if own else 1 if rank.killed else 3 if rank.stopped else 2, rank.values.get("ended", 0.0)

    failed = [rank for rank in ranks if rank.failed or not rank.ended]
    return min(failed, key=order) if failed else None


def _what(rank: Rank) -> list[str]:
    values = rank.values
    if rank.crashed:
        text = rank.stack
    elif rank.killed:
        text = "it was killed from outside (SIGKILL: out of memory?), or left by os._exit: it had no time to say why"
    elif rank.stopped:
        text = f"it was stopped (SIGTERM) at\n{rank.stack}"
    elif values["kind"] == "exit":
        text = f"it ended with exit code {values['code']}\n{values.get('traceback', '')}"
    else:
        text = str(values["traceback"])
    when = time.strftime("%H:%M:%S", time.localtime(values["ended"])) if rank.ended else None
    return [f"  at {when}"] * bool(when) + [f"  {one}" for one in text.strip().splitlines()]


def _short(rank: Rank) -> str:
    values = rank.values
    if rank.stopped:
        return f"was stopped by the launcher (SIGTERM){_place(rank.stack)}"
    if rank.killed or rank.crashed:
        return "was killed" if rank.killed else "crashed"
    if not rank.failed:
        return "finished"
    if values["kind"] == "exit":
        return f"ended with exit code {values['code']}"
    brief = f"{values['exception']}: {str(values['message']).strip().splitlines()[:1] or ['']}"
    if values["kind"] == "interrupted":
        return f"was interrupted (SIGINT){_place(values['traceback'])}"
    why = "saw another rank go" if rank.victim else "failed later"
    return f"{why}: {values['exception']}{_place(values['traceback'])}" if rank.victim else f"{why}: {brief}"


def _place(stack: str) -> str:
    """The innermost line that is not of python or of an installed package."""
    if "Current thread" in stack:  # of all threads, the one that was told to end
        stack = stack[stack.index("Current thread") :].partition("\n\n")[0]
    found = re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', stack)
    own = [one for one in found if one[0][0] != "<" and not _FOREIGN.search(one[0])]
    if not own:
        return ""
    path, number, function = own[-1] if "Traceback" in stack else own[0]
    return f", at {path}:{number} in {function}"


def _earlier(ranks: Sequence[Rank], last: int) -> list[str]:
    said = []
    for attempt in range(last):
        found = first([one for one in ranks if one.values["attempt"] == attempt])
        if found is not None:
            said.append(f"  attempt {attempt}, before a restart: {_who(found)}: {_line(found)}")
    return said


def _line(rank: Rank) -> str:
    if not rank.ended or rank.values["kind"] == "exit":
        return _short(rank)
    return f"{rank.values['exception']}: {rank.values['message']}".splitlines()[0]


def _who(rank: Rank) -> str:
    return f"rank {rank.values['rank']} (host {rank.values['host']}, pid {rank.values['pid']})"
