"""Creates specs from an engine's command, or from a few values."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagcore import plugins
from flagcore.api.inputs import UNNAMED, LoadedSpec, check_chips, validate_engines
from flagcore.contracts import ImportNote
from flagcore.errors import SpecError, SpecErrors, UsageError
from flagcore.i18n import _
from flagcore.spec.clusters import ClusterSection
from flagcore.spec.importing import commented_yaml
from flagcore.spec.models import model_from
from flagcore.spec.public import absolute_model
from flagcore.spec.schema import CommonSection, TrainSection
from flagcore.spec.serving import ProfileSection, ServeSection
from flagcore.spec.validate import Section

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedCommand:
    """A spec's data, with absolute paths, and notes on the arguments of the command."""

    data: dict[str, Any]
    notes: tuple[ImportNote, ...]

    def as_yaml(self) -> str:
        """Return the spec as YAML, with the notes as comments."""
        return commented_yaml(self.data, self.notes)


def read_command(
    engine: str, words: Sequence[str], *, model: str | None = None, chip: str | None = None
) -> ImportedCommand:
    """Return a spec for a command of `engine`. The command is one quoted text, the path of a script, or several words.

    `model`: the path of the model if the command does not contain it. `chip`: the chip of the cluster; if it is None,
    it is detected later. Raises SpecError, UsageError.
    """
    workload = plugins.workload(engine)
    command, envs = _split(words)
    path = absolute_model(model, Path()) if model is not None else None
    data, notes = workload.read_command(command, Path.cwd(), path)
    if chip is not None:
        data["cluster"]["chip"] = chip
    if envs:
        data["envs"] = dict(envs)
    try:
        validate_engines(data, file=Path(), base=Path())
    except SpecError as error:
        problems = [each for each in error.problems if each.key != "model"]
        if problems:
            raise SpecErrors(problems) from None
    check_chips(data.get("cluster"))
    return ImportedCommand(data=data, notes=tuple(notes))


def _split(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command into its words and the variables that it sets before them. Raises UsageError."""
    if len(words) == 1 and os.path.isfile(words[0]):
        words = ["bash", words[0]]
    elif len(words) == 1:
        try:
            words = shlex.split(words[0].replace("\\\n", " "))
        except ValueError as error:
            raise UsageError(_("the command cannot be read: {reason}", reason=error)) from None
    command = list(words)
    envs = dict[str, str]()
    while command and (command[0] == "env" or ASSIGNMENT.match(command[0])):
        name, equals, value = command.pop(0).partition("=")
        if equals:
            envs[name] = value
    if not command:
        raise UsageError(_("the command is empty"))
    if len(command) == 1 and command[0].endswith(".sh"):
        raise UsageError(_("{file} is not a file", file=command[0]))
    return command, envs


TRAINING: Mapping[str, Any] = {"seq_length": 4096, "global_batch_size": 512, "precision": "bf16"}
SERVING: Mapping[str, Any] = {"input_len": 1024, "output_len": 128, "concurrency": 16}
"""The values that a new spec needs, by the kind of its engine, with their defaults."""


def defaults_of(engine: str) -> Mapping[str, Any]:
    """Return the keys that a new spec of an engine needs, each with its default. Raises SpecError."""
    return TRAINING if plugins.workload(engine).kind == "train" else SERVING


def new_spec(engine: str, model: str, cluster: Mapping[str, Any], values: Mapping[str, Any]) -> ImportedCommand:
    """Return a spec for a model: its path, or the name of a public model. Raises SpecError.

    `values`: the values of the keys of `defaults_of`.
    """
    model_from(model, base=Path())
    path = absolute_model(model, Path())
    data: dict[str, Any] = {"model": path, "cluster": dict(cluster)}
    sections: dict[str, type[Section]] = {"": CommonSection, "cluster": ClusterSection}
    if plugins.workload(engine).kind == "train":
        data["train"] = {"engine": engine, **values}
        sections["train"] = TrainSection
    else:
        data["serve"] = {"engine": engine, "profile": dict(values)}
        sections |= {"serve": ServeSection, "serve.profile": ProfileSection}
    data["auto_tuner"] = {"control": {"max_trials": 20, "max_time": 3600}}
    validate_engines(data, file=Path(), base=Path())
    check_chips(cluster)
    return ImportedCommand(data=data, notes=tuple(_comments(data, sections)))


def spec_of_model(
    model: str, *, engine: str | None = None, nodes: int | None = None, devices: int | None = None
) -> LoadedSpec:
    """Return a spec for a model without a file, with the defaults of a new spec. Raises SpecError.

    `engine`: None means the engine that is the default for plans. `devices`: the number per node; None means all.
    """
    engine = engine or next((name for name, each in plugins.engines().items() if each.plans_by_default), "")
    cluster = {"nodes": nodes or 1, **({} if devices is None else {"devices_per_node": devices})}
    return LoadedSpec(UNNAMED, new_spec(engine, model, cluster, defaults_of(engine)).data)


def _comments(data: Mapping[str, Any], sections: Mapping[str, type[Section]]) -> list[ImportNote]:
    """Return the description of each key from the schema."""
    notes = []
    for section, schema in sections.items():
        content: Any = data
        for part in filter(None, section.split(".")):
            content = content[part]
        for key in content:
            if (field := schema.model_fields.get(key)) is not None and field.description:
                notes.append(ImportNote(key, field.description, f"{section}.{key}".lstrip(".")))
    return notes
