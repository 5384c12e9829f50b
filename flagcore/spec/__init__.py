"""The door for YAML and JSON: a file or plain data goes in, frozen dataclasses of `flagcore.domain` come out.

Whatever is wrong with the input ends in one `SpecError` of one line. Importing this package is cheap: pydantic
and yaml are imported by the first call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from flagcore.domain.knob import Knob
    from flagcore.domain.spec import Job, Spec
    from flagcore.errors import SpecError
    from flagcore.spec.knobs import Engines


def read_spec(path: Path, engines: Engines) -> Spec:
    """Read a spec file (YAML, or JSON by its suffix). Paths inside are relative to its folder. Raises SpecError."""
    return parse_spec(spec_as_data(path), file=str(path), base=path.parent, engines=engines)


def parse_spec(data: object, *, file: str, base: Path, engines: Engines, plugin_knobs: Sequence[Knob] = ()) -> Spec:
    """Turn plain data into a spec. `file` is named in errors, `base` is the folder of relative paths.

    Space, baseline and settings are validated against the knobs of the one of `engines` that the spec names.
    `plugin_knobs` are further knobs, whose values are validated once the chip is known. Raises SpecError.
    """
    from flagcore.spec.convert import document_as_spec
    from flagcore.spec.plain_data import plain

    return document_as_spec(plain(data, file=file), file=file, base=base, engines=engines, plugin_knobs=plugin_knobs)


def spec_as_data(path: Path) -> dict[str, Any]:
    """Read a spec file without judging its keys. The result is JSON-serialisable. Raises SpecError."""
    from flagcore.spec.data_file import read_mapping

    return read_mapping(path, file=str(path))


def json_schema(engines: Engines) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a spec, with a description and unit for each key."""
    from flagcore.spec.serve_schema import json_schema as schema

    return schema(engines)


def read_job(line: Mapping[str, object], engines: Engines) -> Job:
    """Turn one job record of one of `engines` into a `Job`. Raises SpecError for one that is not valid."""
    from flagcore.spec.jobs import job_from

    return job_from(line, engines)


def read_job_lines(stream: BinaryIO, *, file: str) -> Iterator[Mapping[str, Any] | SpecError]:
    """Yield the record of each line of a job file that has one, or the error that names `file` and the line."""
    from flagcore.spec.jobs import job_lines

    return job_lines(stream, file=file)
