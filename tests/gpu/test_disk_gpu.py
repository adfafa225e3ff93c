"""What only a real GPU shows of OnDisk and Tiered: pinned pages, and its allocator's own peak."""

from __future__ import annotations

import pathlib

import pytest
import torch

import disthooks as dh
from disthooks.saved.stores.host import PAGE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_it_is_written_from_pinned_pages(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    ticket = store.put(torch.randn(1 << 20, device="cuda"))
    outgoing = ticket.entry.outgoing
    if outgoing is not None:
        assert outgoing.host.is_pinned()
        assert outgoing.host.data_ptr() % PAGE == 0
    store.wait()
    store.drop(ticket)
