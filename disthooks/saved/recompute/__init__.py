"""What is cheap to compute again is not stored."""
