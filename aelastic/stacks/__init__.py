"""Python stacks of workers.

`before_kill` has them taken before a worker is killed, and keeps what reports quote; `collect` asks py-spy, torch's
worker server and the stack hook; `format` reads and quotes their answers, and `places` folds them for a comparison of
all ranks.  `control_sockets` names the workers' sockets.
"""

__all__ = ["before_kill", "control_sockets", "format", "places"]
