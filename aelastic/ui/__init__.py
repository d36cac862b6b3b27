"""What a person at a terminal sees of a run: the status line, the view of all ranks."""
