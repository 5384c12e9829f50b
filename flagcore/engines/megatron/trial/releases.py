"""What the installed release of megatron-core takes: releases (0.12 and later) differ in arguments and fields."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import megatron.core

from flagcore.engines.megatron.trial.job import JobError

T = TypeVar("T")


def accepted(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Return those `values` that `function` takes; the others are of later releases and not needed here."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in known}


def configured(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build one of megatron-core's configurations. Raises JobError for a setting that this release does not have.

    A field that it lacks is left out where its value switches it off.
    """
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in known and value:
            raise JobError(f"megatron-core {megatron.core.__version__} has no {name} (here {value})")
    return kind(**{name: value for name, value in values.items() if name in known})
