"""Run an example on two processes, as ``torchrun --nproc-per-node 2`` would."""

import os
import pathlib
import subprocess
import sys


def on_two_processes(file: str) -> bool:
    """True in the two processes; False in the one that has started them and waited for them."""
    if "RANK" in os.environ:
        return True
    root = str(pathlib.Path(file).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file]
    subprocess.run(launch, env=env, check=True)
    return False
