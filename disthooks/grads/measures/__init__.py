"""What is measured of gradients on each rank, and how the numbers of several ranks become one."""
