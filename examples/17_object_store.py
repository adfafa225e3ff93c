"""Keep what backward needs in an object store: a place of your own is a class with write, read and free.

``memory://`` stands for a bucket here. With ``pip install s3fs`` the URL may be ``s3://bucket/prefix``; gcsfs, adlfs
and others bring more of them. tests/end_to_end/test_object_store.py runs the same on a server that speaks S3.
"""

from __future__ import annotations

import fsspec
import torch
from object_store import Objects, OnObjects
from torch import nn

import disthooks as dh

# The backend: bytes to an object and back.
backend = Objects("memory://bucket/scratch")
key = backend.write(memoryview(b"four"))
found = bytearray(4)
backend.read(key, memoryview(found))
assert bytes(found) == b"four"
backend.free(key)

# The store over it, in a training.
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 1))
batch = torch.randn(512, 64)
model(batch).square().mean().backward()
truth = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()

store = OnObjects("memory://bucket/scratch", in_flight="64 MiB")
with dh.saving(store, at_least="64 KiB") as saved:
    loss = model(batch).square().mean()
store.wait()
objects = fsspec.filesystem("memory").find("/bucket/scratch")
print(f"{len(objects)} objects; {saved.report().moved} bytes left this process")
assert len(objects) >= 4
loss.backward()
assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(model.parameters(), truth, strict=True))

# @register("store") has made it a kind, so a configuration can name it.
plan = dh.config.from_config(
    {"save": [{"modules": "*", "store": {"kind": "OnObjects", "url": "memory://bucket/scratch"}}]}
)
assert plan.saves[0][1].store == OnObjects("memory://bucket/scratch")
