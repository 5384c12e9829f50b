"""Creates specs from the configuration of another tool, from an engine's command, or from a few values, and adds the
trials of another tuner to a run.
"""

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from flagcore import plugins
from flagcore.api.candidate_parser import legal_candidate
from flagcore.api.inputs import (
    RUNS,
    LoadedSpec,
    SpecLike,
    check_chips,
    check_spec,
    fixed_task,
    open_spec,
    spec_data,
    write_spec,
)
from flagcore.contracts import HistoryReader, ImportedSpec, Problem
from flagcore.contracts.capabilities import Commands, commands_of
from flagcore.domain.knob import Knobs
from flagcore.domain.launch import Start
from flagcore.domain.secrets import is_secret, redact_data, redact_text
from flagcore.domain.space import Candidate, KnobValue
from flagcore.domain.trial import Role, Trial
from flagcore.errors import RunError, SpecError, SpecErrors, UsageError, join_errors
from flagcore.i18n import N_, _
from flagcore.spec.containers import CONFIG_MAP, FORMS, IMAGE, left_out, split_words
from flagcore.spec.convert import engines_of
from flagcore.spec.importing import Notes
from flagcore.spec.plain_data import read_text
from flagcore.spec.public import absolute_model
from flagcore.spec.script import UNSET
from flagcore.spec.starts import ENDS_WITH, starts_of
from flagcore.spec.validate import LONGEST_TEXT
from flagcore.tuner.calibration import Experience
from flagcore.tuner.problem import candidate_columns
from flagcore.tuner.stages.predict import with_figures
from flagcore.tuner.store.directory import RunDirectory

_DEVICES = "VISIBLE_DEVICES"


def read_tree(
    directory: Path, name: str, overrides: Sequence[str] = (), *, importer: str | None = None
) -> ImportedSpec:
    """Read the configuration `name` in `directory` with an installed importer. Raises SpecError, UsageError.

    `overrides` have the form a.b=c. `importer` is needed only if several importers are installed.
    """
    return plugins.importer(importer).read_tree(directory, name, overrides, lambda: plugins.load_plugins(()).chips())


def check_imported(found: ImportedSpec) -> None:
    """Raise SpecError, which names keys of the file, if an imported spec is invalid. The model may be missing."""
    try:
        check_spec(LoadedSpec(found.file, found.data), base=Path())
    except SpecError as error:
        problems = [each for each in error.problems if each.key != "model" or not isinstance(each.value, str)]
        if problems:
            raise found.translate_error(SpecErrors(problems)) from None


def read_command(
    engine: str | None, words: Sequence[str], *, model: str | None = None, chip: str | None = None, text: str = ""
) -> ImportedSpec:
    """Return a spec for a command: one quoted text, the path of a file that starts it, or several words.

    `engine`: None means the engine that the command starts. `model`: the path of the model if the command does not
    contain it. `chip`: the chip of the cluster; if it is None, it is detected later. `text`: the content of the file in
    place of `words`. Raises SpecError, UsageError.
    """
    readers = [engine] if engine else plugins.command_readers()
    engines = {name: commands_of(plugins.find_engine(name)) for name in readers}
    words, content = _command(words, text)
    images = {image: entry for each in engines.values() for image, entry in each.images.items()}
    programs = list(starts_of(words, content, images, os.getcwd(), _engine_table("declared")))
    failed = next((n for n, each in enumerate(programs) if each.words[0].startswith(ENDS_WITH)), len(programs))
    first = _engines(engines, programs[:failed])
    found = first or _engines(engines, programs)
    shown = " ".join(words[1:] if content else words) or None
    gave_up = None if first or failed == len(programs) else _not_one(shown, content or "", programs, {})
    if error := _untuned(shown, content or "", programs, found):
        raise error
    if error := _not_one(shown, content or "", programs, found):
        raise gave_up or error
    ((name, *_words), start) = next(iter(found.items()))
    found_engine, path = plugins.find_engine(name), absolute_model(model, Path()) if model is not None else None
    has_script = found_engine.kind == "train" and bool(start.script)
    is_long = has_script and max(map(len, start.script)) > LONGEST_TEXT  # a template, given as text
    for with_script in [True, False] if has_script and not is_long else [False]:
        notes = Notes()
        for each in programs[failed : failed + 1]:
            notes.note("command", f"the script {each.words[0]}: what follows is {'not ' if first else ''}read")
        if has_script and not with_script:
            why = "is long" if is_long else "cannot start it in trials"
            notes.note("train.command", f"is the program without the script, which {why}", "train.command")
        for key, value in {**start.left_out, **({} if with_script else _others(engines[name], programs))}.items():
            text = "is a secret: not copied" if is_secret(key) else f"is left out: {redact_text(value)[:100]}"
            notes.note(key, text)
        envs = _envs({**start.envs, **(start.job if with_script else {})}, notes, start, content or shlex.join(words))
        read = replace(start, envs={**envs, UNSET: start.envs.get(UNSET, "")})
        read = replace(read, envs={**start.job, **read.envs}, words=start.script) if with_script else read
        try:
            data, engine_notes = engines[name].read_command(read, Path.cwd(), path)
            break
        except SpecError as error:
            if with_script and error.key == "train.command":
                continue
            problem, fix = "is not set, but the script uses it", "set it, or write its value in the command"
            missing = [SpecError(key=each, problem=problem, fix=fix) for each in _unset(start)]
            fix = _("give its manifest in the same file or folder")
            maps = [key for key in start.left_out if key.startswith(CONFIG_MAP)]
            missing += [SpecError(key=key, problem=_("is not here"), fix=fix) for key in maps]
            raise join_errors([*(gave_up.problems if gave_up else ()), *error.problems, *missing]) from None
    if (unset := _unset(start)) and str(data["model"]).endswith("/") and not os.path.isdir(data["model"]):
        problem = _("ends with a variable that is not set: {names}", names=", ".join(unset))
        raise SpecError(key="model", value=data["model"], problem=problem, fix=_("set it, or add --model"))
    if chip is not None:
        data["cluster"]["chip"] = chip
    if envs:
        data["envs"] = envs
    spec = ImportedSpec(data=redact_data(data), notes=(*engine_notes, *notes.notes))
    check_imported(spec)
    check_chips(data.get("cluster"))
    return spec


def _engines(engines: Mapping[str, Commands], programs: Sequence[Start]) -> dict[tuple[str, str, str], Start]:
    """Return the programs that are engines, by engine, role and command. Those of one server are a single one."""
    found = dict[tuple[str, str, str], Start]()
    for name, engine in engines.items():
        for start in sorted(programs, key=lambda each: bool(FORMS["follower"].search(" ".join(each.words)))):
            if engine.starts(start.words, os.getcwd()) and not FORMS["tools"].match(shlex.join(start.words)):
                role = start.role or engine.role(start.words)
                key = name, role, FORMS["of copy"].sub("", shlex.join(start.words))
                before = found.get(key, replace(start, instances=0))
                envs = {name: value for name, value in start.envs.items() if before.envs.get(name) == value}
                copies = 0 if key in found and FORMS["follower"].search(" ".join(start.words)) else start.instances
                found[key] = replace(before, instances=before.instances + copies, envs=envs)
    bare = [[*entry] for each in engines.values() for entry in each.images.values()]  # images beside the server's
    found = {key: each for key, each in found.items() if [*each.words] not in bare} or found
    roles = {role: start for (_name, role, _words), start in found.items()}
    if len(found) == len(roles) == 2 and roles.keys() == {"prefill", "decode"}:
        return {next(iter(found)): replace(roles["decode"], prefill=roles["prefill"])}
    return found


def _others(engine: Commands, programs: Sequence[Start]) -> dict[str, str]:
    """Return the other programs of an input, with their arguments, that may change speed."""
    others = [each.words for each in programs if not engine.starts(each.words, os.getcwd())]
    named = {os.path.basename(words[0].removeprefix(IMAGE)): " ".join(words[1:]) for words in reversed(others)}
    return left_out("programs", {name: text or name for name, text in named.items() if not name.startswith(ENDS_WITH)})


def _unset(start: Start) -> list[str]:
    """Return the names of the variables in a program's script that are not set, without those of a machine."""
    names = start.envs.get(UNSET, "").split()
    return [
        each
        for each in names
        if not (is_secret(each) or FORMS["of machine"].search(each) or FORMS["of host"].fullmatch(each))
    ]


def _engine_table(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return a table of the engines' package."""
    text = files("flagcore.engines").joinpath(f"{name}.yaml").read_text("utf-8")
    return cast("Mapping[str, Mapping[str, Any]]", yaml.safe_load(text))  # tables contain merge keys


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


def _envs(variables: Mapping[str, str], notes: Notes, start: Start, text: str) -> dict[str, str]:
    """Return `variables` without secrets and without those of the machine or container. Add a note on each variable. If
    `start` has several instances, each has its own devices. A network device not in `text` was computed here."""
    instances = start.instances
    spec_variables = dict[str, str]()
    for name in _unset(start):
        notes.note(name, "is not set: it is empty in the command")
    for name, value in variables.items():
        if name == UNSET:
            continue
        if is_secret(name) or redact_text(value) != value:
            notes.note(name, "is a secret: not copied")
        elif (start.hosts > 1 and FORMS["of host"].fullmatch(name)) or (
            (FORMS["of network"].search(name) or FORMS["of this host"].search(value)) and not (value and value in text)
        ):
            notes.note(name, "dropped: differs between hosts")
        elif FORMS["of machine"].search(name) or (
            name.endswith(_DEVICES) and (instances > 1 or not re.match("[0-9]", value))
        ):
            notes.note(name, "dropped: belongs to the machine or the container")
        elif not value and start.script:
            notes.note(name, "dropped: its value is not known here")
        elif _is_word(name, value, start.words, text):
            notes.note(name, "dropped: it is part of the command")
        else:
            spec_variables[name] = value
            effect = "restricts the devices of all trials" if name.endswith(_DEVICES) else "is set in all trials"
            notes.note(name, effect, f"envs.{name}")
    return spec_variables


def _is_word(name: str, value: str, words: Sequence[str], text: str) -> bool:
    """Return whether a variable only has a word of the command: a path, the value of a flag of its name, or `$NAME`."""
    values = [word.partition("=")[2 if word.startswith("-") else 0] for word in words]
    flags = [re.sub("^--?|=.*", "", word) for n, word in enumerate(words)
             if word.startswith("-") and value in values[n : n + 2]]  # fmt: skip
    is_named = any(name.lower().replace("_", "-").endswith(flag) for flag in flags if len(flag) > 1)
    return value in values and ("/" in value or is_named or bool(re.search(rf"\$[{{(]?{name}\b", text)))


def _untuned(
    value: str | None, text: str, programs: Sequence[Start], found: Mapping[tuple[str, str, str], Start]
) -> SpecError | None:
    """Return the error for an input that starts what flagcore does not tune, by its name, or None."""
    unknown = [each for each in programs if each.words[0].startswith(IMAGE) and each.words[1:]]
    is_image = len(programs) > 1 and bool(unknown)
    started = [shlex.join(start.words) for start in (unknown if is_image else programs)]
    commands = [each for each in started if not FORMS["tools"].match(each)]
    for name, row in _engine_table("untuned").items():
        if found and not row.get("always"):
            continue
        in_words = "words" in row and any(re.search(row["words"], each) for each in commands)
        is_read = "text" in row and (not is_image or row.get("always"))
        if in_words or (is_read and re.search(row["text"], text, re.MULTILINE)):
            fix = _("plan the shape of its model with `flag estimate --model NAME --chip NAME`")
            problem = _("starts {name}, which `flag import` does not read", name=name)
            if row.get("is"):
                problem = _("is {name}, which `flag import` does not read", name=name)
            return SpecError(key="command", value=value, problem=problem, fix=row.get("fix") or fix)
    return None


def _not_one(
    value: str | None, text: str, programs: Sequence[Start], found: Mapping[tuple[str, str, str], Start]
) -> SpecError | None:
    """Return the error for an input that does not start exactly one engine, or None."""
    commands = [shlex.join(each.words) for each in programs]
    unknown = [
        each.words[0] for each in programs if each.words[0].startswith(IMAGE) and each.words[bool(programs[1:]) :]
    ]
    if len(found) == 1:
        return None
    failure = next((each.words[0] for each in programs if each.words[0].startswith(ENDS_WITH)), "")
    if failure and not found:
        problem = _("starts no engine: it {failure}", failure=redact_text(failure))
        fix = _("give its arguments, as in `flag import -- bash FILE ARGUMENT`, set its variables, or give its command")
        return SpecError(key="command", value=value, problem=problem, fix=_with_unset(fix, programs))
    absent = [hit[1] for hit in map(FORMS["script"].search, commands or [text]) if hit and not os.path.isfile(hit[1])]
    if absent and not found:
        problem = _("starts no engine: the script {file}, which it starts, is not here", file=redact_text(absent[0]))
        fix = _("give that script, or start from the folder to which its path belongs")
        return SpecError(key="command", value=value, problem=problem, fix=_with_unset(fix, programs))
    texts = [redact_text(shlex.join(each.words)) for each in [*(found.values() or programs)][-4:]]
    common = next((n for n, each in enumerate(zip(*texts, strict=False)) if len({*each}) > 1), 0) * (len(found) > 1)
    common = texts[0].rfind(" ", 0, common) + 1 if texts else 0
    shown = ", ".join(f"{'... ' if common > 40 else ''}{each[common * (common > 40) :][:60]}" for each in texts)
    shown = shown or _("nothing")
    problem = _("must start exactly one engine, but starts {n}; its commands are {shown}", n=len(found), shown=shown)
    fix = _("give the command of one of {engines}", engines=", ".join(plugins.command_readers()))
    if found:
        fix = _("give one of them: flag import -- COMMAND")
    elif not commands and text:
        fix = _("it starts no program, and only sets variables at most: give the file or the command that starts one")
    elif any("$" in each or "{" in each or "__" in each for each in unknown):
        fix = _("its image is a placeholder: give the file after `envsubst`, `helm template` or the like has filled it")
    elif unknown:
        fix = _("the entry point of the image is not known: write the program before its arguments")
    return SpecError(key="command", value=value, problem=problem, fix=fix)


def _with_unset(fix: str, programs: Sequence[Start]) -> str:
    """Return a fix with the names of the variables of a script that are not set."""
    names = dict.fromkeys(name for each in programs for name in _unset(each))
    return _("{fix}; not set: {names}", fix=fix, names=", ".join([*names][:6])) if names else fix


MAX_FACTOR = 20.0
"""A warning about units is given if the median ratio between measured and predicted times exceeds this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrials:
    """The trials that were added to a run's folder, and notes on skipped and implausible rows.

    `knobs` are the knobs of the task by name.
    """

    run_dir: Path
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]
    knobs: Knobs = field(default_factory=dict)


def import_history(
    file: Path | str,
    spec: SpecLike,
    *,
    run_dir: Path | str | None = None,
    same_machine: bool = False,
    without: Collection[str] = (),
    importer: str | None = None,
) -> ImportedTrials:
    """Add the rows of another tuner's history to `run_dir` as finished trials.

    `spec` is the job that was tuned. `run_dir` has the same default as in `tune`. With `same_machine`, the rows were
    measured on this machine, and their candidates are not run again. Otherwise, they count as trials of another run.
    `importer` is needed only if several importers are installed. Raises the errors of `flagcore.errors`, and UsageError
    if no row can be used.
    """
    path, (name, data) = Path(file), spec_data(spec)
    if len(engines_of(data)) > 1:
        raise UsageError(_("{file} names several engines: use a spec with the tuned engine only", file=name))
    tool = plugins.importer(importer)
    if not isinstance(tool, HistoryReader):
        raise UsageError(_("{tool} does not support the import of a history", tool=tool.title))
    problem = open_spec(spec, None, without).problem
    found, notes = tool.read_history(path, problem.task, problem.space.axes, partial(_history_candidate, problem))
    if not found:
        reasons = "; ".join(notes[:5]) or _("it has none")
        raise UsageError(_("no row of {file} can be imported: {reasons}", file=path, reasons=reasons))
    role, source = Role.SEARCH if same_machine else Role.IMPORTED, str(path.resolve())
    rows = [problem.predictions.row(problem.row_of(each.candidate)) for each in found]
    predicted = [with_figures(problem.task, each) for each in rows]
    trials = [replace(each, role=role, source=source, predicted=p) for each, p in zip(found, predicted, strict=True)]
    folder = Path(run_dir) if run_dir else RUNS / name.stem
    saved_trials = _save(RunDirectory(folder), problem, data, name.parent, trials, experience=not same_machine)
    notes = (*notes, *_plausibility_warning(trials))
    return ImportedTrials(run_dir=folder, trials=saved_trials, notes=notes, knobs=problem.knobs)


def _history_candidate(problem: Problem, given: Mapping[str, KnobValue]) -> Candidate:
    """Return the candidate with these values of knobs. Raises UsageError if it is not in the space."""
    axes = {axis.knob: axis for axis in problem.space.axes}
    values = {knob: value for knob, value in given.items() if value is not None or axes[knob].neutral is None}
    for knob, value in values.items():
        allowed_values = (*axes[knob].values, axes[knob].neutral, None)
        if isinstance(value, int) and value < (axes[knob].neutral is not None) and value not in allowed_values:
            raise UsageError(_("{knob} = {value} is not a valid size", knob=knob, value=value))
    try:
        candidate = legal_candidate(problem, candidate_columns(problem.platform, values))
    except SpecError as error:
        raise UsageError(str(error)) from None
    if problem.space.find(candidate) is None:
        raise UsageError(_("not in the space of the spec"))
    return candidate


def _save(
    directory: RunDirectory,
    problem: Problem,
    data: Mapping[str, object],
    base: Path,
    trials: list[Trial],
    *,
    experience: bool,
) -> tuple[Trial, ...]:
    """Write the trials to the folder of a run and, with `experience`, their measurements for use by other runs."""
    from flagcore.tuner.store.trials import OptunaStore  # importing optuna is slow

    directory.open()
    try:
        identity = directory.identity()
        url = identity["fixed"].get("storage") if identity else None
        run = directory.claim(fixed_task(data, problem), {"baseline": problem.baseline.as_dict(), "storage": url})
        objective = problem.platform.task.spec.objective
        store = OptunaStore(directory.path, problem.space.choices, run=run, objective=objective, url=url)
        if any(trial.source == trials[0].source for trial in store.trials()):
            text = N_("{folder} already contains the trials of {file}: use another --run-dir")
            raise RunError(_(text, folder=directory.path, file=trials[0].source))
        write_spec(directory.path, data, base)
        saved_trials = tuple(store.add(trial) for trial in trials)
        if experience:
            Experience.of_user().save(f"{run}-imported", problem.platform.task, saved_trials)
    finally:
        directory.close()
    return saved_trials


def _plausibility_warning(trials: list[Trial]) -> list[str]:
    """Return a warning if all measured times are far from the predictions."""
    ratios = [ratio for trial in trials if (ratio := trial.measured_over(trial.predicted))]
    median_ratio = float(np.median(ratios)) if ratios else 1.0
    if 1.0 / MAX_FACTOR < median_ratio < MAX_FACTOR:
        return []
    text = N_("the measured step times are {ratio:.3g} times the predicted ones: check the units and the job")
    return [_(text, ratio=median_ratio)]
