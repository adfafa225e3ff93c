"""Logs of runs that are made by hand, for the report and its page."""

from __future__ import annotations

import json
import math
import pathlib
import random
from typing import Any

EVIL = "</script><img src=x onerror=alert(1)>"


def measured(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what the loop set, which is of the first rank alone and has the seconds of the step."""
    return {name: value for name, value in record.items() if "loop/" not in name}


class Said:
    """A sink of one's own that notes what is done with it."""

    def __init__(self, fails: str = "") -> None:
        self.said: list[Any] = []
        self.fails = fails

    def _note(self, what: Any, name: str) -> None:
        self.said.append(what)
        if self.fails == name:
            raise OSError(f"{name}: disk full")

    def open(self) -> str:
        self._note("open", "open")
        return "is not called"

    def __call__(self, record: dict[str, Any]) -> None:
        self._note(record["step"], "call")

    def close(self) -> None:
        self._note("close", "close")


def log(file: pathlib.Path, steps: int, layers: int, ranks: int = 2, evil: str = "", every: int = 1) -> pathlib.Path:
    """A log of ``stats.full()``: ``layers`` parameters and modules, with a NaN and a spike in the last quarter.

    ``evil`` is in every name, and ``every`` is the distance from one logged step to the next.
    """
    chance = random.Random(0)
    params = [f"blocks.{i // 4}.{'abcd'[i % 4]}{evil}.weight" for i in range(layers)]
    modules = [name.removesuffix(".weight") for name in params]
    about = {
        "engine": f"DDP{evil}",
        "ranks": ranks,
        "parameters": layers,
        "every": every,
        "rules": [f"x{evil}"],
        "stats": [],
    }
    spike = 3 * steps // 4
    with file.open("w", encoding="utf-8") as out:
        for at in range(steps):
            noise = [math.exp(chance.gauss(0, 0.15)) for _ in range(layers)]
            jump = [300.0 if at == spike and i >= layers // 2 else 1.0 for i in range(layers)]
            record: dict[str, Any] = {
                "step": at * every,
                "loss": 3 * math.exp(-at / steps) * math.exp(chance.gauss(0, 0.02)),
                "loss/max_rank": 3.1 * math.exp(-at / steps),
                "loss/argmax_rank": chance.randrange(ranks),
                "grad_norm": math.exp(chance.gauss(0, 0.1)),
                "grad_norm/max_rank": 1.2,
                "grad_norm/mean_rank": 1.1,
                "grad_norm/argmax_rank": at % ranks,
                "grad_norm/of_ranks": {str(rank): 1.0 + 0.2 * (rank == at % ranks) for rank in range(ranks)},
                "clip_ratio": 0.5 + 0.5 * (at % 2),
                "update_ratio": 1e-3,
                "lr": 1e-3,
                "nonfinite": int(at == steps - 2),
                "run": "r",
                "restart": int(at > steps // 2),
                "time": 1.7e9 + at,
                "note": 1.0 + at,
            }
            if at == 0:
                record |= {"about": about, "names": {"param": params, "module": modules}}
            if at == steps - 2:
                record |= {
                    "grad_norm": "nan",
                    "nonfinite_at": [{"param": params[-1], "rank": 1}],
                    "nonfinite_ranks": [1],
                    "grad_norm/of_ranks": {"0": 1.0, "1": "nan"},
                }
            bad = [1.0 if at == steps - 2 and i == 0 else 0.0 for i in range(layers)]
            record["param"] = {
                "grad_norm": ["nan" if b else round(n, 6) for n, b in zip(noise, bad, strict=True)],
                "update_ratio": [round(1e-3 * n, 9) for n in noise],
                "grad_norm/max_rank": [round(1.1 * n, 6) for n in noise],
            }
            record["module"] = {
                "activation_rms": [round(n * (1 + i / layers), 6) for i, n in enumerate(noise)],
                "activation_max": [round(4 * n * j, 6) for n, j in zip(noise, jump, strict=True)],
                "activation_max/argmax_rank": [1] * layers,
                "activation_rms/argmax_rank": [1] * layers,
                "activation_zeros": [round(0.5 * i / layers, 6) for i in range(layers)],
                "activation_nonfinite": bad,
            }
            out.write(json.dumps(record) + "\n")
    return file
