"""For each way of training, where a gradient lives and when it is final; ``detect_engine(model)`` picks one."""
