"""What this node tells the coordinator and is told: a pure core."""
