"""``Recompute``: a saved tensor that is a cheap function of other saved tensors is computed again, not stored."""
