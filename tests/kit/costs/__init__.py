"""Events whose cost is measured, each in a job, or on a node, of any size."""
