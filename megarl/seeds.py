"""Seeds made from the names of what is drawn, so that a resumed run draws what an unbroken one would have drawn."""

from __future__ import annotations

import hashlib


def draw_seed(*parts: object) -> int:
    """Return a 63-bit seed made from whatever names the draw."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
