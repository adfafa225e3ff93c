"""Repeated decompositions keep their factors for backward, call after call: these calls save to disk, others stay."""

from __future__ import annotations

import tempfile

import torch

import disthooks as dh

torch.manual_seed(0)
folder = tempfile.gettempdir()
to_disk = dh.saving(dh.OnDisk(folder), at_least="16 KiB")

# A decorated function: nobody who calls it has to know.
qr, eigh = to_disk(torch.linalg.qr), to_disk(torch.linalg.eigh)


def growth(step: torch.Tensor, qr: object, count: int = 40) -> torch.Tensor:
    """How fast directions grow under ``step`` (Lyapunov exponents): a QR decomposition each time."""
    q, total = torch.eye(len(step), dtype=step.dtype), torch.zeros(len(step), dtype=step.dtype)
    for _ in range(count):
        q, r = qr(step @ q)
        total = total + r.diagonal().abs().log()  # small, and outside of the decorated call: stays in memory
    return total / count


step = (torch.eye(64) + 0.1 * torch.randn(64, 64)).double().requires_grad_()
(truth,) = torch.autograd.grad(growth(step, torch.linalg.qr)[:8].sum(), step)
exponents = growth(step, qr)
print("repeated QR, held on disk until backward:", to_disk.report().held, "bytes")
assert to_disk.report().held > 2 * 30 * step.nbytes
(grad,) = torch.autograd.grad(exponents[:8].sum(), step)
assert torch.equal(grad, truth)
assert to_disk.report().held == 0


# A method of one's own: a network contracted site by site, what is carried cut back to a few bonds by an SVD.
class Network:
    def __init__(self, sites: torch.Tensor, bonds: int) -> None:
        self.sites, self.bonds = sites, bonds

    @to_disk
    def cut(self, matrix: torch.Tensor) -> torch.Tensor:
        u, s, v = torch.linalg.svd(matrix)
        return (u[:, : self.bonds] * s[: self.bonds]) @ v[: self.bonds]

    def contract(self, count: int) -> torch.Tensor:
        carried = self.sites[0]
        for i in range(count):
            carried = self.cut(self.sites[i % len(self.sites)] + carried / carried.norm())
        return carried.square().sum()


sites = torch.randn(4, 64, 64).double().requires_grad_()
(slope,) = torch.autograd.grad(Network(sites, 48).contract(20), sites)
assert slope.isfinite().all()


# A Function of one's own, and the derivative of its derivative.
@to_disk
class Trace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, a: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return (a @ a @ a).trace()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        return 3 * grad * (a @ a).mT


energies = eigh(step + step.mT).eigenvalues
(first,) = torch.autograd.grad(Trace.apply(step) + energies[-1], step, create_graph=True)
(second,) = torch.autograd.grad(first.square().sum(), step)
assert second.isfinite().all()
print(to_disk.report())
