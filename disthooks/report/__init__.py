"""What a run has logged: reading it, finding what moved first, the verdict, and the page."""
