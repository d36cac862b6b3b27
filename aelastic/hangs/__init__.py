"""Workers that live but do not progress: file timers, silence, no CPU use."""
