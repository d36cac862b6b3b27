"""Commands about a job: `asking` sends a request to its agent, and `explaining` reads event logs.

Answers are printed in the words of `texts`.
"""

__all__ = ["asking", "explaining"]
