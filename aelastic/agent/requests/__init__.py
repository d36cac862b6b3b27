"""Requests to a job that runs, on this node: what is asked of it here, and what it is told to do about it.

- `notices`: what this node does about an interruption that is announced; `notice_sources`: where that is heard of
- `enquiries`: what this node asks of the job, and shows of itself to others
- `answers`: answers requests at the door (`agent.channels`); `commands`: reads them; `user_names`: names the users
"""

__all__ = ["answers", "commands", "enquiries", "notice_sources", "notices", "user_names"]
