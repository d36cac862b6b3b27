"""The worker group of this agent: what it does next, and its contracts with what carries that out."""
