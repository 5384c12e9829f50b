"""Amounts with units, as people write them."""

from __future__ import annotations

import re

BYTES_PATTERN = r"^([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(?:([KMGT])(i?))?B$"


def parse_bytes(text: str) -> int:
    """Return the bytes in e.g. `4GiB` (2**30 each), `80GB` (10**9 each) or `4096B`.

    Raises ValueError for any other text.
    """
    match = re.fullmatch(BYTES_PATTERN, text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not an amount such as 4GiB, 80GB or 4096B")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))
