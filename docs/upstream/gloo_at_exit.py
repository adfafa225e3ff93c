"""A process that exits while gloo's threads hold tensors ends with SIGABRT. No disthooks in here.

python docs/upstream/gloo_at_exit.py            # pairs of processes, and how they ended
python docs/upstream/gloo_at_exit.py --destroy  # the same with destroy_process_group() at the end
"""

from __future__ import annotations

import collections
import subprocess
import sys
import tempfile

PAIRS = 12


def rank(number: int, folder: str, destroy: bool) -> None:
    import torch
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    for _ in range(20):
        dist.all_reduce(torch.ones(300_000), async_op=True)  # nobody waits for it
    if destroy:
        dist.destroy_process_group()


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        rank(int(sys.argv[2]), sys.argv[3], "--destroy" in sys.argv)
        return
    ends: collections.Counter[tuple[int, ...]] = collections.Counter()
    for _ in range(PAIRS):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", __file__, "rank"]
            pair = [subprocess.Popen([*command, str(i), folder, *sys.argv[1:]]) for i in range(2)]
            ends[tuple(process.wait() for process in pair)] += 1
    for codes, count in ends.items():
        print(f"exit codes {codes}: {count} of {PAIRS} pairs")


if __name__ == "__main__":
    main()
