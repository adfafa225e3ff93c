"""Start a script of this folder again, as two processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile


def is_rank(file: str) -> bool:
    """True in a process that torchrun started; in any other one, run ``file`` in two of them, and False.

    Both have the name of an empty folder in ``FOLDER``.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return True
    call = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file]
    path = os.pathsep.join(part for part in sys.path if part)  # what can be imported here can be there
    with tempfile.TemporaryDirectory() as folder:
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FOLDER": folder}
        subprocess.run(call, check=True, env={**os.environ, **own})
    return False
