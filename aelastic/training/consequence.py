"""Whether an error in a rank is a consequence of another rank's end, or the script's own."""

from __future__ import annotations

import dis
import sys
import traceback
from types import TracebackType

import torch

from aelastic.training.link import Link, RoundOver

# How long a rank whose collective failed waits for the agent to end the round, if no socket of the round is closed.
_UNCUT_S = 0.2
_SOON_S = 3.0  # before it prints that it waits


def is_consequence(error: BaseException, link: Link, number: int, patience_s: float) -> bool:
    """Whether a collective raised the error because the round ended, as the agent has reported or soon reports.

    An error that the script raises is always its own.  So is one after which the process cannot use its device.

    Args:
        error: what the function raised.
        link: to the agent.
        number: of the round.
        patience_s: seconds until the error is taken for this rank's own, if a socket of the round is closed.
    """
    if isinstance(error, RoundOver):
        return True
    if not isinstance(error, Exception):
        return False
    chain = _chain(error)
    if any(isinstance(each, _own_errors()) for each in chain):
        return False
    if not any(isinstance(each, RuntimeError) and _is_raised_by_torch(each) for each in chain):
        return False
    if not link.sockets.was_cut_by_peer():
        return link.wait_for_over(number, _UNCUT_S)
    if link.wait_for_over(number, _SOON_S):
        return True
    what = traceback.format_exception_only(error)[-1].strip()
    why = "another rank has closed a connection, so this rank waits to hear whether the round is over"
    print(f"aelastic: {what}; {why}", file=sys.stderr, flush=True)
    return link.wait_for_over(number, patience_s)


def _own_errors() -> tuple[type[BaseException], ...]:
    accelerator_error = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # since torch 2.8
    return torch.OutOfMemoryError, accelerator_error


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error and its causes: a framework may have wrapped the error of a collective."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return chain


def _is_raised_by_torch(error: BaseException) -> bool:
    """Whether C code or `torch.distributed` raised the error, and not a `raise` elsewhere in Python.

    C code has no frame, so the innermost frame is in the script either way.  The instruction tells the two apart.
    """
    innermost: TracebackType | None = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return True
    code = innermost.tb_frame.f_code
    if "/torch/distributed/" in code.co_filename:
        return True
    instruction = next(each for each in dis.get_instructions(code) if each.offset == innermost.tb_lasti)
    return instruction.opname != "RAISE_VARARGS"
