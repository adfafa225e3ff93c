"""What a training step will need, found on fake tensors before anything runs for real."""
