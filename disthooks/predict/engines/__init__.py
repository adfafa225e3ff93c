"""Engines on ranks that do not exist: DDP, FSDP, tensor parallelism and ZeRO, by torch's and DeepSpeed's own code."""
