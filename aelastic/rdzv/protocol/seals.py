"""What agents write in a store, proved: whoever can write there, and has no secret, has written nothing.

The proof is the last item of the JSON list that it proves.  A key is made for each run id, so what one job has written
says nothing in another; that a cell is an older one of the same job shows in its term.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hmac import compare_digest

from aelastic.rdzv.protocol.keys import Key, shown

_LABEL = b"aelastic cell"
_SEALED = re.compile(rb'(.*), "proof ([0-9a-f]{16}) ([0-9a-f]{64})"\]', re.DOTALL)


class ForeignError(Exception):
    """No agent with this secret wrote it; says what differs."""


def sign(text: bytes, keys: Sequence[Key]) -> bytes:
    """What to write, of a text that is a JSON list; without a key the text itself."""
    if not keys:
        return text
    proof = f', "proof {keys[0].id} {keys[0].made_of(_LABEL, text)[0].hex()}"]'
    return text.removesuffix(b"]") + proof.encode()


def verify(text: bytes, keys: Sequence[Key]) -> bytes:
    """The text that an agent of this job wrote; empty where nothing is written.

    Raises:
        ForeignError: another agent did, or another program.
    """
    found = _SEALED.fullmatch(text)
    if not text or (found is None and not keys):
        return text
    if not keys:
        raise ForeignError("its agents have a secret and this one has none: use the same --secret-file on every node")
    own = shown([each.id for each in keys])
    if found is None:
        raise ForeignError(f"it was written without a secret (ours is key {own})")
    inner, key_id, proof = found[1] + b"]", found[2].decode(), bytes.fromhex(found[3].decode())
    key = next((each for each in keys if each.id == key_id), None)
    if key is None:
        raise ForeignError(f"it was written with another secret (key {shown([key_id])}; ours is {own})")
    if not compare_digest(proof, key.made_of(_LABEL, inner)[0]):
        raise ForeignError(f"it was changed after it was signed, or has another run id (key {own})")
    return inner


def claimed(text: bytes) -> bytes:
    """What a text says, whoever wrote it."""
    found = _SEALED.fullmatch(text)
    return text if found is None else found[1] + b"]"
