"""The process that searches: the text of `host.signals` and of this file, fed to an interpreter as its standard input.

It receives requests, a text and patterns as JSON, and answers for each pattern as soon as it has searched for it.  It
ends with the agent, because that closes the agent's end of the socket.
"""

import os
import re
import signal
import sys

if __name__ != "__main__":  # the program has it in its own text above
    from aelastic.base.host.signals import ignore_signals

# CPU time for one pattern.
LIMIT_S = 0.05
REQUEST_BYTES_MAX = 1 << 17
FOUND, NOT_FOUND, TOO_LONG = b"found", b"not found", b"too long"


class TooLongError(Exception):
    """A search has computed for `LIMIT_S`."""


def give_up(*_: object) -> None:
    """Ends the search: Python's `re` checks for signals while it searches, in the main thread."""
    raise TooLongError


def search(pattern: str, text: str) -> bytes:
    """Returns the answer for one pattern."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
        found = re.search(pattern, text)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except TooLongError:
        return TOO_LONG
    return NOT_FOUND if found is None else FOUND


def main(agent: int) -> None:
    """Answers until the agent's end of the socket is closed."""
    import json

    ignore_signals()
    signal.signal(signal.SIGVTALRM, give_up)
    while request := os.read(agent, REQUEST_BYTES_MAX):
        text, *patterns = json.loads(request)
        for pattern in patterns:
            os.write(agent, search(pattern, text))


if __name__ == "__main__":
    main(int(sys.argv[1]))
