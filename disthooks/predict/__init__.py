"""What a model will save for backward, where, and whether it fits, before anything runs."""
