"""Where a worker stands in its Python code."""
