"""Verbs, by which people speak to a job: `asking` asks its agent, and says the answer in the words of `texts`."""

__all__ = ["asking"]
