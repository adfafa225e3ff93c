"""What a model will save, where, and whether it fits, before anything runs."""
