"""Stacks of workers: where each stands in its Python code.

`before_kill` dumps them before SIGKILL, `collect` gets them from py-spy, faulthandler or the worker, `format` reads and
shortens them; `control_sockets` are those on which torch's workers answer.
"""

__all__ = ["before_kill", "control_sockets"]
