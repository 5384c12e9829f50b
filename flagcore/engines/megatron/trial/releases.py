"""Adapts arguments and fields to the installed release of megatron-core (0.12 and later)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import megatron.core

from flagcore.engines.megatron.trial.job import JobError

T = TypeVar("T")


def accepted_arguments(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Return the `values` that `function` accepts; the others belong to later releases."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in parameters}


def build_config(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a configuration of megatron-core. Raises JobError for a setting that this release does not support.

    An unsupported field is skipped if its value is off.
    """
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in known and value:
            raise JobError(f"megatron-core {megatron.core.__version__} does not support {name} = {value}")
    return kind(**{name: value for name, value in values.items() if name in known})
