"""Lightning: one callback, on two processes under DDP. Elsewhere it is the same line, under any strategy."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any

import torch
from _torchrun import is_rank
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HOOKS = {
    "save": [{"modules": "blocks.*", "store": {"kind": "OnDisk", "directory": tempfile.gettempdir()}}],
    "watch": {"every": 1, "rules": [{"kind": "SkipNonFinite"}], "stats": [{"kind": "Norm"}, {"kind": "NonFinite"}]},
}


def main() -> None:
    warnings.filterwarnings("ignore")
    import lightning as L
    from lightning.pytorch.utilities import grad_norm

    from disthooks.integrations.lightning import DisthooksCallback

    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.ERROR)

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(2))
            self.norms: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x = batch[0]
            for block in self.blocks:
                x = block(x)
            return nn.functional.mse_loss(x, batch[0].roll(1, 1))

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))  # Lightning's own

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    # Without an argument: what DISTHOOKS_CONFIG names, ./disthooks.yaml or ./hooks.yaml.
    callback, model = DisthooksCallback(HOOKS), Model()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        gradient_clip_val=0.1,  # Lightning's, which comes after: the norm logged is from before
        callbacks=[callback],
        enable_model_summary=False,
        **quiet,
    )
    rows = torch.randn(64, 16, 64, generator=torch.Generator().manual_seed(0))
    trainer.fit(model, DataLoader(TensorDataset(rows), batch_size=8))

    assert callback.saved is not None
    assert callback.saved.moved > 0
    norm = float(trainer.callback_metrics["gradients/grad_norm"])  # what loggers get, and ModelCheckpoint(monitor=...)
    assert abs(norm / model.norms[-1] - 1) < 1e-4
    assert len(model.norms) == 4
    if trainer.is_global_zero:
        print(f"moved {callback.saved.moved} bytes; gradient norm {norm:.4f}, Lightning says {model.norms[-1]:.4f}")


if is_rank(__file__):
    main()
