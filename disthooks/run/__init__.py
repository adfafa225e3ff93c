"""How hooks get into a script: ``python -m disthooks.run train.py``, and the commands of ``disthooks``.

``python -m disthooks.run [--hooks FILE] train.py ARGS`` runs a training script as it is, with hooks attached. Under
``torchrun``, ``accelerate launch ... -m disthooks.run`` and ``deepspeed --module disthooks.run`` each worker does so.
The configuration is read before the script starts. Hooks are attached when a model whose parameters an optimizer holds
is first called with gradients on: it is wrapped by then, whatever wraps it, and no backward has run. They are taken off
when the script ends. ``worker.py`` runs the script, and ``session.py`` attaches; ``cli`` has a file for each command of
``disthooks``.
"""
