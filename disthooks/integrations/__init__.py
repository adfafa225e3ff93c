"""Frameworks that train: each file imports its own framework, and nothing here is imported by ``import disthooks``."""
