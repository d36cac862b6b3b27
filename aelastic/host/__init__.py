"""What the kernel tells of this machine: processes, file changes."""
