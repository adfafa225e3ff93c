"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import disthooks as dh
from tests.support.ranks.harness import Ranks
from tests.support.sim import simulated

# A shell starts a background job with SIGINT ignored, and the processes that tests start would inherit that: Ctrl-C
# would reach none of them. Python installs its own handler only when SIGINT is not ignored, so it is installed here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The models of the tests are small: what they save has to go to disk all the same (the harness of ranks does so too).
dh.OnDisk.min_bytes = dh.OnCpu.min_bytes = 4096


def pytest_collection_finish(session: pytest.Session) -> None:
    """The simulated device has to be there before the first backward, when autograd starts a thread for each device."""
    wanted = any("device" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not torch.cuda.is_available():
        simulated.missing()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests of forks have a process without a device: torch refuses a backward in a fork of one that has autograd's."""
    if pyfuncitem.get_closest_marker("forks") is None or not torch.accelerator.is_available():
        return None
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(command, env=hidden, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return True


@pytest.fixture
def device() -> Iterator[torch.device]:
    """An accelerator: CUDA where there is one, otherwise the simulated one (tests/support/sim/simulated.py)."""
    if torch.cuda.is_available():
        yield torch.device("cuda", 0)
        return
    if not simulated.compiler():
        pytest.skip("no CUDA device, and no C++ compiler for the simulated one")
    assert not simulated.missing(), simulated.missing()
    simulated.delays()
    simulated.poison()
    yield torch.device("sim", 0)
    torch.accelerator.synchronize()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two gloo processes; ``ranks(function, *args)`` is the list of what ``function(rank, *args)`` returned."""
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture
def four() -> Ranks:
    """Four of them, which start when they are first called and then stay up too."""
    from tests.support.ranks.proof import FOUR

    return FOUR
