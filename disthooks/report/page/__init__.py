"""The pages of explanations and of runs: one style, one script for what they share, and their pictures."""
