"""This machine, as its kernel shows it: processes, files that grow.

`proc_table` is the only reader of the process table, `usage` of CPU time and memory; `reaping` waits for children,
`inotify` for files.
"""

__all__ = ["inotify", "proc_table", "reaping", "usage"]
