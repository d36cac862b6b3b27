"""The terminal: `status_line` below the output of a run, `rank_view` in its place if asked for."""

__all__ = ["status_line"]
