"""Places that saved tensors can be kept in."""
