"""Preloaded into the fork server of `multiprocessing`, which then ignores signals like all helper processes.

The fork server reports how workers end, so it must outlive them, even if a scheduler signals every process of the job.
Processes forked from it, workers of this agent or others of the surrounding program, handle signals as usual.
"""

import os
import signal

from aelastic.base.host.signals import ignore_signals

# The fork server ignores SIGINT by itself, and restores the previous handler in its forks.
_usual = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}


def _take_signals_back() -> None:
    for signum, usual in _usual.items():
        if usual is not None and signum not in {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, usual)


ignore_signals()
signal.signal(signal.SIGINT, _usual[signal.SIGINT])
os.register_at_fork(after_in_child=_take_signals_back)
