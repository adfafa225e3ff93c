"""In what order the kinds of hook fire: for one tensor by hand, and for a module by ``dh.trace``."""

from __future__ import annotations

import torch
from torch import nn

import disthooks as dh

# Plain torch, one product: the hooks say when it is their turn.
fired: list[str] = []
x = torch.ones(3, requires_grad=True)
y = x * 2
node = y.grad_fn
assert node is not None


def say(what: str):
    return lambda *args: fired.append(what)


y.retain_grad()
node.register_hook(say("node: after it ran"))
node.register_prehook(say("node: before it runs"))
y.register_hook(say("tensor: its gradient is complete"))
x.register_post_accumulate_grad_hook(say("leaf: .grad is updated"))
x.register_hook(say("leaf: its gradient is complete"))
y.sum().backward()
print(*fired, sep="\n")
assert fired == [
    "tensor: its gradient is complete",
    "node: before it runs",
    "node: after it ran",
    "leaf: its gradient is complete",
    "leaf: .grad is updated",
]

# A leaf's tensor hook also fires for torch.autograd.grad, which updates no .grad.
fired.clear()
torch.autograd.grad((x * 2).sum(), x)
assert fired == ["leaf: its gradient is complete"]

# A module, with everything that dh.trace sees.
torch.manual_seed(0)
layer = nn.Linear(3, 2)
with dh.trace(layer, show="*", full_backward=True) as traced:
    layer(torch.randn(5, 3, requires_grad=True)).sum().backward()

order = [event.kind for event in traced.events if event.name in ("", "weight")]
first = {kind: order.index(kind) for kind in order}
assert order[0] == "forward_pre"
assert first["forward_pre"] < first["pack"] < first["forward"]
assert first["forward"] < first["full_backward_pre"] < first["output_grad"] < first["unpack"]
assert first["unpack"] < first["full_backward"]
assert first["unpack"] < first["tensor_hook"] < first["post_accumulate"]
assert order.count("pack") == order.count("unpack") == 2  # the input and the weight
