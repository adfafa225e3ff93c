"""Figures of devices, and what follows from them: seconds, and what the caching allocator holds."""
