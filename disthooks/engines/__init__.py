"""Where a gradient lives and when it is final, on each way of training; ``find.find(model)`` picks one."""
