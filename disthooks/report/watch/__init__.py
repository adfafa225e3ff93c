"""Looking at a model while it runs: what layers return, and which hooks fire when; no number changes."""
