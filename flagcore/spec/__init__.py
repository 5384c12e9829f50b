"""Reads specs and job records from YAML or JSON, and converts them to dataclasses of `flagcore.domain`.

Invalid input raises `SpecError`, which lists all problems of a file. The modules of this package, pydantic and yaml are
imported only when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flagcore.spec.convert import parse_spec, read_spec
    from flagcore.spec.jobs import read_job, read_job_lines
    from flagcore.spec.plain_data import spec_as_data
    from flagcore.spec.serving import json_schema

__all__ = ["json_schema", "parse_spec", "read_job", "read_job_lines", "read_spec", "spec_as_data"]

_MODULES = {
    **dict.fromkeys(("parse_spec", "read_spec"), "convert"),
    **dict.fromkeys(("read_job", "read_job_lines"), "jobs"),
    "json_schema": "serving",
    "spec_as_data": "plain_data",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(import_module(f"flagcore.spec.{_MODULES[name]}"), name)
