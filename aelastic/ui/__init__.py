"""The state of a run on a terminal: `status_line` draws it, `rank_view` lays out the view of all ranks."""

__all__ = ["status_line"]
