"""What a training script imports: recovery in place, and notices of an interruption.

Importing this package costs a script neither torch nor the agent's code.
"""
