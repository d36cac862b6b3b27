"""Proofs of the texts that agents write to a store, so that texts of writers without the secret are ignored.

The proof is the last item of the JSON list that it proves.  Each run id has its own key, so the text of one job is
worthless in another.  An older text of the same job is recognized by its term.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hmac import compare_digest

from aelastic.rdzv.protocol.keys import Key, shown

_LABEL = b"aelastic cell"
_SEALED = re.compile(rb'(.*), "proof ([0-9a-f]{16}) ([0-9a-f]{64})"\]', re.DOTALL)


class ForeignError(Exception):
    """The text was not written by an agent with this secret; the message tells what differs."""


def sign(text: bytes, keys: Sequence[Key]) -> bytes:
    """Returns a text, a JSON list, with its proof; without a key the text itself."""
    if not keys:
        return text
    proof = f', "proof {keys[0].id} {keys[0].made_of(_LABEL, text)[0].hex()}"]'
    return text.removesuffix(b"]") + proof.encode()


def verify(text: bytes, keys: Sequence[Key]) -> bytes:
    """Returns the text that an agent of this job wrote, without its proof; empty if there is no text.

    Raises:
        ForeignError: another agent or another program wrote it.
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
    """Returns a text without its proof, whether or not that is valid."""
    found = _SEALED.fullmatch(text)
    return text if found is None else found[1] + b"]"
