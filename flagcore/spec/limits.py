"""The types of single values, with their bounds, and amounts with units. A number beyond them is a slip."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import Field

BYTES_PATTERN = r"^([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(?:([KMGT])(i?))?B$"
MAX_DEVICES = 1_000_000
MIN_MEMORY, MAX_MEMORY = 1 << 20, 1 << 50

Devices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
NoLayers = Annotated[int, Field(ge=0, le=10_000)]
Size = Annotated[int, Field(ge=1, le=2**31)]
NoSize = Annotated[int, Field(ge=0, le=2**31)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=0, le=1_000)]
Seconds = Annotated[float, Field(gt=0, le=100_000_000)]
Steps = Annotated[int, Field(ge=2, le=1_000_000)]
NoSteps = Annotated[int, Field(ge=0, le=1_000_000)]
Trials = Annotated[int, Field(ge=1, le=1_000_000)]
Probes = Annotated[int, Field(ge=0, le=1_000)]
Repeats = Annotated[int, Field(ge=0, le=1_000)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Value = Annotated[str, Field(max_length=100_000)]
ModelPath = Annotated[str, Field(min_length=1, max_length=4096, examples=["./Qwen3-8B"])]
Folder = Annotated[str, Field(min_length=1, max_length=4096, examples=["../training"])]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Amount = Annotated[str, Field(pattern=BYTES_PATTERN, examples=["4GiB"])]
Rate = Annotated[float, Field(ge=1_000_000, le=10**15)]
Bytes = Annotated[int, Field(ge=MIN_MEMORY, le=MAX_MEMORY)]
Precision = Literal["bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


def parse_bytes(text: str) -> int:
    """Return the bytes in e.g. `4GiB` (2**30 each), `80GB` (10**9 each) or `4096B`.

    Raises ValueError for any other text.
    """
    match = re.fullmatch(BYTES_PATTERN, text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is not an amount such as 4GiB, 80GB or 4096B")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))
