"""What CUDA's operators would save, on fake tensors of a machine that has none."""
