"""The folder that `python -m aelastic.under` puts in front of PYTHONPATH."""

__all__ = ["sitecustomize"]
