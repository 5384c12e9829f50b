"""Creates specs from the configuration of another tool, from an engine's command, or from a few values."""

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from flagcore import plugins
from flagcore.api.inputs import UNNAMED, LoadedSpec, check_chips, validate_engines
from flagcore.contracts import ImportedSpec
from flagcore.domain.launch import Start
from flagcore.domain.secrets import is_secret, redact_data, redact_text
from flagcore.domain.spec import ImportNote
from flagcore.errors import FlagError, SpecError, SpecErrors, UsageError
from flagcore.i18n import _
from flagcore.plugins import WORKLOADS, names
from flagcore.spec.clusters import ClusterSection
from flagcore.spec.importing import Notes
from flagcore.spec.models import model_from
from flagcore.spec.plain_data import read_text
from flagcore.spec.public import absolute_model
from flagcore.spec.schema import CommonSection, TrainSection
from flagcore.spec.serving import ProfileSection, ServeSection
from flagcore.spec.starts import split_words, starts_of
from flagcore.spec.validate import Section

_OF_MACHINE = re.compile(r"^(PATH|HOME|HOSTNAME|USER|LANG|TZ|HF_HOME|HF_HUB_CACHE|XDG_\w+|\w+_proxy|\w+_PROXY)$")
_DEVICES = "VISIBLE_DEVICES"


def read_tree(
    directory: Path, name: str, overrides: Sequence[str] = (), *, importer: str | None = None
) -> ImportedSpec:
    """Read the configuration `name` in `directory` with an installed importer. Raises SpecError, UsageError.

    `overrides` have the form a.b=c. `importer` is needed only if several importers are installed.
    """
    return plugins.importer(importer).read_tree(directory, name, overrides, lambda: plugins.load_plugins(()).chips())


def check_imported(found: ImportedSpec) -> None:
    """Raise SpecError if an imported spec is invalid. It names the keys of the imported file.

    The path of the model may be missing.
    """
    try:
        validate_engines(found.data, file=Path(found.file), base=Path())
    except SpecError as error:
        problems = [each for each in error.problems if each.key != "model" or not isinstance(each.value, str)]
        if problems:
            raise found.translate_error(SpecErrors(problems)) from None


def read_command(
    engine: str | None, words: Sequence[str], *, model: str | None = None, chip: str | None = None, text: str = ""
) -> ImportedSpec:
    """Return a spec for a command. The command is one quoted text, the path of a file that starts it, or several words.

    Files are scripts, batch scripts, compose files, manifests and systemd units. `engine`: None means the engine that
    the command starts. `model`: the path of the model if the command does not contain it. `chip`: the chip of the
    cluster; if it is None, it is detected later. `text`: the content of the file in place of `words`.
    Raises SpecError, UsageError.
    """
    workloads = {name: plugins.workload(name) for name in ([engine] if engine else names(WORKLOADS))}
    words, content = _command(words, text)
    images = {image: entry for each in workloads.values() for image, entry in each.images.items()}
    programs = list(starts_of(words, content, images, os.getcwd()))
    found = dict[tuple[str, str], Start]()
    for name, workload in workloads.items():
        for start in programs:
            if workload.starts(start.words, os.getcwd()):
                key = name, re.sub(r"--\w*port[= ]\S+", "", shlex.join(start.words))
                copies = found[key].instances if key in found else 0
                found[key] = replace(start, instances=copies + start.instances)
    if len(found) != 1:
        raise _not_one(words, content or "", programs, found)
    ((name, _words), start) = next(iter(found.items()))
    workload, notes = workloads[name], Notes()
    has_script = workload.kind == "train" and start.script
    envs = _envs({**start.envs, **start.job} if has_script else start.envs, notes)
    path = absolute_model(model, Path()) if model is not None else None
    start = replace(start, words=start.script if has_script else start.words, envs=envs)
    data, engine_notes = workload.read_command(start, Path.cwd(), path)
    if chip is not None:
        data["cluster"]["chip"] = chip
    if envs:
        data["envs"] = envs
    spec = ImportedSpec(data=redact_data(data), notes=(*engine_notes, *notes.notes))
    check_imported(spec)
    check_chips(data.get("cluster"))
    return spec


def _command(words: Sequence[str], text: str) -> tuple[list[str], str | None]:
    """Return the words of a command, and the content of its file, if it is one. Raises UsageError."""
    if text or len(words) != 1:
        return list(words), text or None
    if os.path.isfile(words[0]):
        return ["bash", words[0]], read_text(Path(words[0]), file=words[0], key="file")
    command = split_words(words[0])
    if {">", ">>", "2>&1", "|", "&", "&&", ";"} & set(command):
        return [], words[0]  # a shell has to read it
    if not command:
        raise UsageError(_("the command is empty"))
    if len(command) == 1 and re.search(r"\.\w{2,7}$", command[0]):
        raise UsageError(_("{file} is not a file", file=command[0]))
    return command, None


def _envs(variables: Mapping[str, str], notes: Notes) -> dict[str, str]:
    """Return the variables without secrets, and without those of the machine or the container. Each gets a note."""
    spec_variables = dict[str, str]()
    for name, value in variables.items():
        if is_secret(name) or redact_text(value) != value:
            notes.note(name, "is a secret: not copied")
        elif _OF_MACHINE.search(name) or (name.endswith(_DEVICES) and not re.match("[0-9]", value)):
            notes.note(name, "dropped: belongs to the machine or the container")
        else:
            spec_variables[name] = value
            effect = "restricts the devices of all trials" if name.endswith(_DEVICES) else "is set in all trials"
            notes.note(name, effect, f"envs.{name}")
    return spec_variables


def _not_one(
    words: Sequence[str], text: str, programs: Sequence[Start], found: Collection[tuple[str, str]]
) -> SpecError:
    """Return the error for an input that starts no engine, or several. It names a program that flagcore knows but does
    not tune.
    """
    commands, value = [shlex.join(each.words) for each in programs], " ".join(words[1:] if text else words) or None
    table = yaml.safe_load(files("flagcore").joinpath("engines/untuned.yaml").read_text("utf-8"))
    for name, row in table.items() if not found else ():
        in_words = "words" in row and any(re.search(row["words"], each) for each in commands)
        if in_words or ("text" in row and re.search(row["text"], text, re.MULTILINE)):
            fix = _("plan the shape of its model with `flag estimate --model NAME --chip NAME`")
            problem = _("starts {name}, which flagcore does not tune", name=name)
            return SpecError(key="command", value=value, problem=problem, fix=row.get("fix") or fix)
    shown = ", ".join(redact_text(each)[:60] for each in commands[:4]) or _("nothing")
    problem = _("must start exactly one engine, but starts {n}; its commands are {shown}", n=len(found), shown=shown)
    fix = _("give the command of one of {engines}", engines=", ".join(names(WORKLOADS)))
    return SpecError(key="command", value=value, problem=problem, fix=fix)


TRAINING: Mapping[str, Any] = {"seq_length": 4096, "global_batch_size": 512, "precision": "bf16"}
SERVING: Mapping[str, Any] = {"input_len": 1024, "output_len": 128, "concurrency": 16}
"""The values that a new spec needs, by the kind of its engine, with their defaults."""


def defaults_of(engine: str) -> Mapping[str, Any]:
    """Return the keys that a new spec of an engine needs, each with its default. Raises SpecError."""
    return TRAINING if plugins.workload(engine).kind == "train" else SERVING


def new_spec(engine: str, model: str, cluster: Mapping[str, Any], values: Mapping[str, Any]) -> ImportedSpec:
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
    return ImportedSpec(data=data, notes=tuple(_comments(data, sections)))


def spec_of_model(
    model: str, *, engine: str | None = None, nodes: int | None = None, devices: int | None = None
) -> LoadedSpec:
    """Return a spec for a model without a file, with the defaults of a new spec. Raises SpecError.

    `engine`: None means the engine that is the default for plans. `devices`: the number per node; None means all.
    """
    engine = engine or _default_engine()
    cluster = {"nodes": nodes or 1, **({} if devices is None else {"devices_per_node": devices})}
    return LoadedSpec(UNNAMED, new_spec(engine, model, cluster, defaults_of(engine)).data)


def _default_engine() -> str:
    for name in plugins.engines():
        with suppress(FlagError):  # raised for engines that cannot be loaded
            if plugins.workload(name).plans_by_default:
                return name
    return ""


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
