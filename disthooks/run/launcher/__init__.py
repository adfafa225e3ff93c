"""``disthooks launch``: start torchrun, ``accelerate launch`` or ``deepspeed``; each worker is ``disthooks.run``.

.. code-block:: text

    disthooks launch --config_file accelerate.yaml train.py ARGS      # accelerate launch
    disthooks launch torchrun --nproc-per-node 2 train.py ARGS
    disthooks launch deepspeed --num_gpus 2 train.py ARGS
"""

from __future__ import annotations

from disthooks.run.launcher.main import main

__all__ = ["main"]
