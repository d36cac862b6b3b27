"""The keys of one job, derived from a secret.

Keyed BLAKE2b (RFC 7693), with a label for each purpose, so that a proof of one thing does not prove another.
"""

from __future__ import annotations

from hashlib import blake2b

KEY_BYTES = 32
ID_BYTES, RUN_BYTES = 8, 4
ID_CHARS = 4  # of an id, in messages: enough to see that two differ


class Key:
    """The key of one job, derived from one secret.

    Args:
        secret: at least 32 bytes.
        run_id: the job's.

    Attributes:
        id: identifies the secret without revealing it; 16 hexadecimal digits.
        run: identifies the run id; 8 hexadecimal digits.
    """

    __slots__ = ("_key", "id", "run")

    def __init__(self, secret: bytes | memoryview, run_id: str) -> None:
        master = blake2b(secret, digest_size=KEY_BYTES, person=b"aelastic secret").digest()
        run = run_id.encode(errors="surrogatepass")
        self.id = blake2b(key=master, digest_size=ID_BYTES, person=b"aelastic id").hexdigest()
        self.run = blake2b(run, digest_size=RUN_BYTES, person=b"aelastic run id").hexdigest()
        self._key = blake2b(run, key=master, digest_size=KEY_BYTES, person=b"aelastic run").digest()

    def made_of(self, label: bytes, text: bytes) -> tuple[bytes, bytes]:
        """Returns two proofs of a text, or two keys for it, one for each side; 32 bytes each.

        Args:
            label: their purpose, at most 16 bytes.
        """
        both = blake2b(text, key=self._key, digest_size=2 * KEY_BYTES, person=label).digest()
        return both[:KEY_BYTES], both[KEY_BYTES:]


def shown(ids: tuple[str, ...] | list[str]) -> str:
    """Returns ids of keys, as messages show them."""
    return " and ".join(each[:ID_CHARS] for each in ids)
