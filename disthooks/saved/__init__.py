"""Between forward and backward: where the tensors that autograd saves live."""
