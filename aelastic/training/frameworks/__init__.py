"""Adapters of recovery in place for frameworks that own the training loop: one module for each.

A module imports its framework, so import it only in a script that has the framework.  Private names of a framework are
at the top of its module.
"""

from __future__ import annotations

__all__ = ["accelerate", "lightning", "transformers"]
