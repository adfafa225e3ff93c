"""The explanation as one HTML page."""
