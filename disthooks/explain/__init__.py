"""Predicts, on fake tensors and before anything runs, what a model saves in a training step, and where."""
