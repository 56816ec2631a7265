"""Seeds by what is sampled, not by when: the same run samples the same, whatever order its work was done in."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, ordinal: int, sample: int) -> int:
    """64 bits for one response; the engine adds the token's index."""
    text = f"{run_seed}/{ordinal}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
