"""Requests to a job that runs, on this node: what is asked of it here, and what it is told to do about it.

- `notices`: what this node does about an interruption that is announced; `notice_sources`: where that is heard of
- `enquiries`: what this node asks of the job, and shows of itself to others
- `door`: the socket by which people ask; `answers`: what is answered there
"""

__all__ = ["answers", "door", "enquiries", "notice_sources", "notices"]
