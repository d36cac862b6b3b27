"""One run of an agent: the layer between the worker group, which decides, and the shells, which carry out.

- `run`: the mailbox loop; carries out the worker group's actions and notifies the observers
- `generation`: one start of the workers, followed until none of their processes is left
- `group`: the core: what this node does next with its workers
- `watches`: how far workers have started, their progress since, and whether they hang
- `grace_watch`: what workers still do while they are being stopped
- `run_event_source`: what the group does, as run events; `outcome`: what became of it, as the result of the run
- `link`: this agent's link to the leader, as its spec says; `open_files`: how many files it may need
- `resources`: logs, channels, store, watches, rendezvous link and back end, opened and closed together; what this node
 offers to the rendezvous
- `channels`: how users reach the job, and how workers reach their agent
- `postmortem`: a worker's return value, or why it failed; `error_rules`: which rules match that failure
- `requests`: requests to a running job
- `stuck_workers`: workers that hang or do not end: `stack_dumps` takes their stacks, `hang_comparisons` asks all nodes,
 and `places` finds where they are
- `calls`: checks what a program passes to a `Supervisor`
- `health_gate`: whether this node is fit
"""

__all__ = ["calls", "error_rules", "open_files", "resources", "run"]
