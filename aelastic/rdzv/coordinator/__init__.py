"""Who takes part in the next round: decided by one agent, as a pure core."""
