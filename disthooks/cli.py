"""The command line: ``disthooks env`` and ``disthooks check hooks.yaml``."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import tempfile


def main() -> None:
    """Run the command line; without typer and rich, say how to get them."""
    try:
        import typer
    except ImportError:
        sys.exit("the command line needs typer and rich: pip install 'disthooks[cli]'")
    app = typer.Typer(add_completion=False, no_args_is_help=True, help="Hooks on saved tensors and gradients.")
    app.command()(env)
    app.command()(check)
    app()


def env() -> None:
    """Print the versions and abilities of this machine that matter to disthooks; put it into bug reports."""
    import torch

    from disthooks import __version__

    rows = {
        "disthooks": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, {torch.cuda.device_count()} GPUs, {torch.get_num_threads()} threads",
        "backends": ", ".join(_backends()) or "none",
        "temporary directory": f"{tempfile.gettempdir()}: {_disk(tempfile.gettempdir())}",
    }
    for name in ("accelerate", "deepspeed", "lightning", "numpy", "pydantic", "pyyaml", "transformers"):
        rows[name] = _version(name)
    for name, value in rows.items():
        print(f"{name:20} {value}")


def check(file: str) -> None:
    """Read a configuration file as a training run would and print what it asks for."""
    from disthooks.config import from_config
    from disthooks.errors import DisthooksError

    try:
        plan = from_config(file)
    except DisthooksError as error:
        sys.exit(str(error))
    for patterns, line in plan.saves:
        print(f"save   {', '.join(map(str, patterns))}: {line}")
    for name, value in plan.watches.items():
        print(f"watch  {name}: {value if isinstance(value, int) else len(value)}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> list[str]:
    import torch.distributed as dist

    return [b for b in ("gloo", "nccl", "mpi") if dist.is_available() and dist.is_backend_available(b)]


def _disk(directory: str) -> str:
    from disthooks.errors import StoreError
    from disthooks.saved.stores.disk import OnDisk

    try:
        OnDisk(directory)
    except StoreError as error:
        return str(error)
    return "can hold saved tensors"
