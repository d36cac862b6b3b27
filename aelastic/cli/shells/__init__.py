"""What shells need to complete a command line: `completion` prints scripts for them.

A script starts `job_names` to learn the run ids of jobs.
"""

__all__ = ["completion", "job_names"]
