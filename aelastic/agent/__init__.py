"""One run of an agent: what lies between the worker group, which decides, and the shells, which do.

- `run`: the mailbox loop; carries out what the worker group asks for, and tells the observers
- `generation`: one start of the workers, followed until nothing of them is left
- `watches`: how far workers are, as they start and after, and whether they go on
- `grace_watch`: what workers that are stopped still do
- `resources`: logs, channels, store, watches, rendezvous link and back end, opened and closed as one; what this node
  offers to the rendezvous
- `channels`: how people speak to the job, and its workers with their agent
- `postmortem`: what a worker left: its return value, or why it failed; `error_rules`: which rules name that failure
- `requests`: what is asked of a job that runs
- `stuck_workers`: workers that hang, or do not end: `stack_dumps` takes their stacks, `inquiry` asks all nodes, and
  `places` says where they are
- `calls`: what a program may pass to a `Supervisor`
- `health_gate`: whether this node is fit
"""

__all__ = ["calls", "error_rules", "resources", "run"]
