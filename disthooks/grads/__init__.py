"""Rules for gradients and statistics of them, right over all ranks."""
