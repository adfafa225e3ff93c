"""A headless Chromium that tests drive: over a pair of pipes, so that it needs no port and no library."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import pytest

#: Chromium reads commands from descriptor 3 and writes answers to descriptor 4. This program puts the pipes there.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WAIT = 60.0


def find_browser() -> str:
    """The path of Chromium. Without one the test is skipped, or fails if DISTHOOKS_BROWSER is 1."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        message = f"no browser: none of {', '.join(_NAMES)} is installed; `make browser` installs one"
        if os.environ.get("DISTHOOKS_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return found


class Browser:
    """A browser with one tab, which speaks the DevTools protocol.

    Attributes:
        events: what the tab reported since :meth:`open`: method and parameters.
    """

    def __init__(self, path: str) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._numbers, self._session, self._rest = itertools.count(1), "", b""
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_commands, self._commands = _pipe()
        self._answers, write_answers = _pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"]
        self._errors = pathlib.Path(self._folder.name, "stderr")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(read_commands), str(write_answers), path, *options],
                pass_fds=(read_commands, write_answers),
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        os.close(read_commands)
        os.close(write_answers)

    def __enter__(self) -> Browser:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(1280, 900)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        """The next answer; events are noted on the way."""
        end = time.monotonic() + _WAIT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            read = os.read(self._answers, 1 << 20) if ready else b""
            if not read:
                errors = self._errors.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the browser {'ended' if ready else 'gives no answer'}:\n{errors}")
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message

    def open(self, file: pathlib.Path) -> None:
        """Load a file and wait until its scripts have run."""
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        self.wait_for(lambda: any(method == "Page.loadEventFired" for method, _ in self.events))

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON can hold it."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, is_so: Callable[[], object]) -> None:
        """Return once ``is_so()`` holds."""
        end = time.monotonic() + _WAIT
        while not is_so():
            assert time.monotonic() < end, "what the test waits for does not happen"
            self.run("new Promise((resolve) => setTimeout(resolve, 20))")

    def resize(self, width: int, height: int) -> None:
        """Give the page so many pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Ask the page for "light" or "dark" colours."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def point_at(self, selector: str, right: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """Move the pointer over the element, to this part of its width and of its height; gives the place."""
        box = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " found.scrollIntoView({block: 'center', behavior: 'instant'}); const box = found.getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        x, y = box[0] + box[2] * right, box[1] + box[3] * down
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the element."""
        x, y = self.point_at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Write text into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, file: pathlib.Path, whole: bool = False) -> None:
        """Write what the page shows, or all of it, as a PNG file."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """What the console, the scripts and the security policy complained about since :meth:`open`."""
        found = []
        for method, given in self.events:
            if method == "Runtime.exceptionThrown":
                found.append(str(given["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
                found.append(str(given["args"]))
            elif method == "Log.entryAdded":
                found.append(given["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses that the page asked for since :meth:`open`."""
        return [given["request"]["url"] for method, given in self.events if method == "Network.requestWillBeSent"]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser for as long as the context is open."""
    with Browser(find_browser()) as found:
        yield found


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are larger than those that :data:`_LAUNCH` takes."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
