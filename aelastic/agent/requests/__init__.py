"""Requests to a running job, on this node: those made here, and the leader's notices about them.

- `notices`: carries out announced interruptions; `notice_sources`: where announcements come from
- `queries`: sends this node's requests and queries to the job, and answers queries from other nodes
- `answers`: answers clients of the control socket (`agent.channels`); `commands`: parses their requests; `user_names`:
  looks up the names of users
"""

__all__ = ["answers", "commands", "notice_sources", "notices", "queries", "user_names"]
