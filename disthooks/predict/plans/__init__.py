"""What the hooks of a plan do to the tensors of a prediction."""
