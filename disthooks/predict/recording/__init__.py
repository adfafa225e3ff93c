"""What happened in a step: its operators, its memory, and what autograd saved."""
