"""Output of workers: from their files to the console."""
