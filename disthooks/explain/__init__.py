"""What a training step will save, where, and whether it fits, said before anything runs."""
