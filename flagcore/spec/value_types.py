"""Types of the values of specs and job records, with their limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from flagcore.errors import join_errors
from flagcore.i18n import _
from flagcore.spec.plain_data import spec_error
from flagcore.spec.validate import BYTES_PATTERN, Context, parse_bytes, rule

MAX_DEVICES = 1_000_000
MIN_MEMORY, MAX_MEMORY = 1 << 20, 1 << 50

Devices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
NoDevices = Annotated[int, Field(ge=0, le=MAX_DEVICES)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
NoLayers = Annotated[int, Field(ge=0, le=10_000)]
Size = Annotated[int, Field(ge=1, le=2**31)]
NoSize = Annotated[int, Field(ge=0, le=2**31)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(gt=0, le=1_000)]
Seconds = Annotated[float, Field(gt=0, le=100_000_000)]
Wait = Annotated[float, Field(ge=0, le=86_400)]
Steps = Annotated[int, Field(ge=2, le=1_000_000)]
NoSteps = Annotated[int, Field(ge=0, le=1_000_000)]
PlannedSteps = Annotated[int, Field(ge=1, le=1_000_000_000)]
Trials = Annotated[int, Field(ge=1, le=1_000_000)]
Probes = Annotated[int, Field(ge=0, le=1_000)]
Repeats = Annotated[int, Field(ge=0, le=1_000)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
Value = Annotated[str, Field(max_length=100_000)]
ModelPath = Annotated[str, Field(min_length=1, max_length=4096, examples=["./Qwen3-8B"])]
Folder = Annotated[str, Field(min_length=1, max_length=4096, examples=["../training"])]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Amount = Annotated[str, Field(pattern=BYTES_PATTERN, examples=["4GiB"])]
Rate = Annotated[float, Field(ge=1_000_000, le=10**15)]
Latency = Annotated[float, Field(gt=0, le=1)]
Speed = Annotated[float, Field(ge=0.01, le=100)]
Price = Annotated[float, Field(ge=0, le=1_000_000)]
Bytes = Annotated[int, Field(ge=MIN_MEMORY, le=MAX_MEMORY)]


def _size_of(amount: int | str | None, _context: Context) -> int | None:
    if not isinstance(amount, str):
        return amount
    if not MIN_MEMORY <= (size := parse_bytes(amount)) <= MAX_MEMORY:
        raise spec_error("", "must be from 1MiB to 1024TiB", value=amount, fix="write e.g. 4GiB")
    return size


def _environment_of(envs: Mapping[str, str | int], _context: Context) -> dict[str, str]:
    problem, fix = _("is not the name of an environment variable"), _("use letters, digits and underscores")
    if invalid := [name for name in envs if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)]:
        raise join_errors([spec_error((name,), problem, fix=fix) for name in invalid])
    return {name: str(value) for name, value in envs.items()}


Memory = Annotated[Bytes | Amount | None, rule(_size_of)]
"""A size in bytes, or with a unit."""
Envs = Annotated[dict[str, Value | int], rule(_environment_of)]
"""Environment variables."""
