"""The engine `command`: any training program that prints its steps, described by `train.program` of the spec."""

import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_importers.dialect import read_config
from flagcore_importers.programs import check_version, find_program, package_version, unknown_release
from flagcore_training.commands import NO_COMMAND, environment, unknown_placeholders
from flagcore_training.lengths import cut_warnings
from flagcore_training.reading import FAILURES, Record, compared, measurement, warmup_of_fewer
from flagcore_training.real_job import changed, on_devices, write_config
from flagcore_vendorkit.metrics import NoMetrics

from flagcore.contracts import Costs, Engine, Platform, Steps
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Launch
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import Candidate, Columns, FloatArray, IntArray, KnobValue, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.domain.steps import warmup_steps
from flagcore.domain.trial import Answers, Measurement
from flagcore.errors import LaunchError, SpecError
from flagcore.i18n import _
from flagcore_trainers import logs, meaning, start
from flagcore_trainers import program as sections
from flagcore_trainers.importing import processes
from flagcore_trainers.meaning import Codes, WholeModel

FILLED = {"global_batch_size", "seq_length", "steps", "config"}
"""The placeholders of commands that are neither meanings nor knobs, nor those of all commands."""


def _whole_number(value: object) -> int | None:
    """Return a number of a command or a configuration file, such as 2e8, as an integer. None if it is not whole."""
    with suppress(ValueError, OverflowError):
        number = float(str(value))
        return int(number) if number.is_integer() else None
    return None


class Trainer(Engine):
    """Training with a program that somebody else wrote.

    `program`: the description of the program. None if the engine was not yet asked for a spec's.
    `releases`: the known releases of `distribution`, as a PEP 440 specifier.
    """

    kind = "train"
    knobs: tuple[Knob, ...] = ()
    failures = FAILURES
    plans = WholeModel()
    program: sections.ProgramSection | None = None
    releases = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def with_program(self, program: object) -> Engine:
        if program is None:
            return self
        engine = copy.copy(self)
        engine.program = sections.program_of(program)
        engine.knobs = tuple(sections.knob_of(name, row) for name, row in engine.program.knobs.items())
        return engine

    @property
    def described(self) -> sections.ProgramSection:
        """The description of the program. Raises SpecError if the spec has none."""
        if self.program is None:
            fix = "list its knobs, such as program: {knobs: {tp: {flag: --tp, values: [1, 2]}}}"
            raise SpecError(key="train.program", problem=_("is missing"), fix=fix)
        return self.program

    # The search space

    def codes(self) -> Codes:
        """Return what the codes of each knob with a meaning mean."""
        found = {}
        for (name, row), knob in zip(self.described.knobs.items(), self.knobs, strict=True):
            if (role := sections.meaning_of(name, row)) is not None:
                by_value = sections.numbers_of(row)
                table = np.array([0, *(by_value[word] or 0 for word in knob.words)] if knob.words else [], np.int64)
                if role == meaning.RECOMPUTE and knob.kind == "flag":
                    table = np.array([0, sections.LARGEST[role]])
                found[role] = (name, table)
        return found

    def numbers(self, task: Task, columns: Columns) -> dict[str, IntArray]:
        """Return the number of each meaning for each candidate."""
        batch = task.spec.train.global_batch_size
        return meaning.numbers(self.codes(), self.described.numbers, columns, task.cluster.devices, batch)

    def rules(self, task: Task) -> tuple[Rule, ...]:
        return meaning.rules(task, self.codes(), self.described.numbers)

    def usual_space(self, task: Task) -> Mapping[str, str | tuple[KnobValue, ...]]:
        """Return the configuration that the user runs today: the values in the command and its configuration file."""
        found = self._own_values(task.spec)
        return {knob.name: (knob.neutral if value is None else value,) for _row, knob, _given, value in found}

    def _own_values(self, spec: Spec) -> Iterator[tuple[sections.KnobRow, Knob, Any, KnobValue | None]]:
        """Yield what the command or its file gives for each knob, if it counts, and the value of the knob for it."""
        command = self.command(spec)
        for row, knob in zip(self.described.knobs.values(), self.knobs, strict=True):
            given = None if row.default is not None else command.value(row)
            own = _whole_number(given) if knob.kind == "int" else None
            listed = {str(value).lower(): value for value in sections.values_of(row)}.get(str(given).lower())
            if given is None:
                yield row, knob, None, None
            else:
                yield row, knob, given, listed if own is None or own < (knob.minimum or 0) else own

    # Predictions

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        numbers = self.numbers(task, columns)
        return meaning.predict(task, numbers, costs, self.states(task), self.buffers(task, columns, numbers))

    def states(self, task: Task) -> sections.StateSection:
        """Return the bytes of each weight's gradient, main copy and moments."""
        return self.described.state_bytes

    def buffers(self, task: Task, columns: Columns, numbers: Mapping[str, IntArray]) -> Mapping[str, FloatArray] | None:
        """Return the bytes of gathered weights and buffers, as for `meaning.predict`. None: not known."""
        return None

    # Trials

    def config_of(self, spec: Spec) -> str | None:
        """Return the path of the configuration file that appears in the command, or None if there is no file."""
        return self.described.config

    def command(self, spec: Spec) -> start.Command:
        """Return the user's command with its configuration file. Raises SpecError."""
        train, config = spec.train, self.config_of(spec)
        if train.command is None:
            problem, fix = _("is missing"), "write the words of your command, or let `flag import -- COMMAND` do it"
            raise SpecError(key="train.command", problem=problem, fix=fix)
        for name, row in self.described.knobs.items():
            if row.env and (
                any(row.env in each for each in spec.variables)
                or any(word.startswith(f"{row.env}=") for word in train.command)
            ):
                key, problem = f"train.program.knobs.{name}.env", "is also set by envs or train.command"
                raise SpecError(key=key, value=row.env, problem=problem, fix="remove one of the two")
        directory = train.directory or "."
        if config is None:
            return start.Command(words=train.command, directory=directory)
        content = read_config(config, directory)
        start.check_config_word(train.command, config)
        try:
            changed(content, dict.fromkeys((each.key for each in self.described.knobs.values() if each.key), None))
        except LaunchError as error:
            fix = "write a section there"
            raise SpecError(key="train.program.config", value=config, problem=str(error), fix=fix) from None
        return start.Command(words=train.command, directory=directory, config=config, content=content)

    def warnings(self, task: Task) -> Sequence[str]:
        missing = [] if task.spec.train.command else [_(NO_COMMAND, key="train.command")]
        return [*self.spec_warnings(task.spec), *self.task_warnings(task), *missing, *cut_warnings(task.spec.train)]

    def spec_warnings(self, spec: Spec) -> Sequence[str]:
        """Return warnings about the release, placeholders without a meaning, and knobs that nothing passes."""
        train, program = spec.train, self.described
        words = " ".join((*(train.command or ()), *train.flags, *program.trial_args))
        unused = [*unknown_placeholders([words], (*FILLED, *sections.MEANINGS, *program.knobs))]
        unused += [
            f"train.program.knobs.{name} has no `flag`, `key` or `env`, and train.command has no {{{name}}}: "
            f"only the variable FLAGCORE_{name.upper()} has its value"
            for name, row in program.knobs.items()
            if not (row.flag or row.key or row.env)
            and not any(f"{{{each}}}" in words for each in (name, sections.meaning_of(name, row)))
        ]
        if self.releases:
            return [*unused, *unknown_release("train.engine_version", self.name, train.engine_version, self.releases)]
        if train.engine_version is not None:
            unused.append(f"train.engine_version = {train.engine_version} is not used by the engine {self.name}")
        return unused

    def task_warnings(self, task: Task) -> Sequence[str]:
        """Return warnings about the baseline, and about processes of the command without devices."""
        lines, key = list[str](), "train.command"
        if task.spec.baseline is None:
            lines += self._unlisted(task.spec)
            usual = {name: values[0] for name, values in self.usual_space(task).items()}
            columns = self.columns(task, usual)
            if broken := [rule.message for rule in self.rules(task) if rule.broken(columns).any()]:
                why = "; ".join(broken)
                lines.append(_("{key} is not legal; the baseline is another configuration: {why}", key=key, why=why))
        train, groups = task.spec.train, task.cluster.groups
        per_host = processes(train.command or (), train.directory or ".")
        if per_host and len(groups) == 1 and per_host != groups[0].devices_per_node:
            devices = groups[0].devices_per_node
            lines.append(f"{key} starts {per_host} processes on a host, and cluster.devices_per_node is {devices}")
        return lines

    def _unlisted(self, spec: Spec) -> Iterator[str]:
        """Yield a line for each value of the user's that no value of its knob stands for: the baseline has another."""
        for row, knob, given, value in self._own_values(spec):
            if given is not None and value is None:
                key, neutral = f"train.program.knobs.{knob.name}.values", str(knob.neutral).lower()
                where = row.key or row.flag or knob.name
                yield f"{where} = {given!r} is not in {key}: the baseline has {neutral} instead"

    def ready(self, spec: Spec) -> None:
        Trainer.command(self, spec)  # which a plan does not need
        command, program = self.command(spec), self.described
        for name, row in program.knobs.items():
            if row.env and row.env in os.environ:
                key, problem = f"train.program.knobs.{name}.env", "is also set in this shell"
                raise SpecError(key=key, value=row.env, problem=problem, fix=f"unset {row.env}")
        if self.distribution and (path := find_program(command.words[0], command.directory)):
            check_version(spec, package_version(path, self.distribution))
        if program.log.format == "huggingface":
            flag = start.flag_value([*command.words, *program.trial_args], "--logging_steps")
            keys = {**command.content, **program.trial_keys}
            if str(flag or keys.get("logging_steps")) != "1":
                problem, fix = _("needs a line per step"), "add --logging_steps 1 to train.program.trial_args"
                raise SpecError(key="train.program.log.format", value="huggingface", problem=problem, fix=fix)

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        task, program, values = platform.task, self.described, candidate.as_dict()
        spec, command, written = task.spec, Trainer.command(self, task.spec), ""
        placeholders = self._placeholders(task, candidate, folder)
        if command.config:
            content = changed(command.content, self._keys(task, candidate, for_real=for_real))
            written = write_config(content, Path(folder, f"candidate{Path(command.config).suffix}"))
        added = () if for_real else program.trial_args
        argv = start.argv_of(command, program.knobs, values, placeholders, (*spec.train.flags, *added), written)
        if for_real:
            argv = on_devices(argv, spec)
        if not for_real and self._needs_clock():
            argv = (sys.executable, "-m", "flagcore_trainers.clock", *argv)
        own = {row.env: self._word(name, values[name]) for name, row in program.knobs.items() if row.env}
        own = {name: word for name, word in own.items() if word != sections.UNSET}
        if replaced := [f"{name}={word}" for name, word in own.items() if name in platform.environment]:
            argv = ("env", *replaced, *argv)  # otherwise the plugin's value, which the launch adds, would count
        variables = {**environment({name: values[name] for name in program.knobs}), **own}
        return Launch(argv=argv, folder=folder, environment=variables, directory=command.directory)

    def _keys(self, task: Task, candidate: Candidate, *, for_real: bool) -> dict[str, Any]:
        """Return the values of keys of a candidate's configuration file."""
        knobs, values = self.described.knobs, candidate.as_dict()
        keys = {row.key: self._value(name, values[name]) for name, row in knobs.items() if row.key}
        return keys | self.further_keys(task, candidate) | ({} if for_real else self.trial_keys(task))

    def further_keys(self, task: Task, candidate: Candidate) -> dict[str, Any]:
        """Return further keys of a candidate's configuration file, also for the real job. By default none."""
        return {}

    def trial_keys(self, task: Task) -> dict[str, Any]:
        """Return the keys of the configuration file that only trials set."""
        return dict(self.described.trial_keys)

    def _value(self, name: str, value: KnobValue) -> Any:
        """Return a value of a knob with the type that it has in the spec."""
        row = self.described.knobs[name]
        listed = row.values if isinstance(row.values, list) else list(row.values)
        return next((each for each in listed if sections.as_value(row, each) == value), value)

    def _word(self, name: str, value: KnobValue) -> str:
        """Return a value of a knob as the text of a variable. Switches are 1 and 0."""
        own = self._value(name, value)
        return str(int(own) if isinstance(own, bool) else own)

    def _placeholders(self, task: Task, candidate: Candidate, folder: str) -> dict[str, object]:
        numbers = self.numbers(task, self.columns(task, candidate.as_dict()))
        train = task.spec.train
        return {
            **{name: int(values[0]) for name, values in numbers.items()},
            **candidate.as_dict(),
            "global_batch_size": train.global_batch_size,
            "seq_length": train.seq_length,
            "steps": task.spec.control.train_iters,
            "folder": folder,
        }

    def trial_notes(self, platform: Platform, candidate: Candidate | None) -> Sequence[str]:
        if candidate is None:
            return ()
        program, lines, key = self.described, [], "train.command"
        if program.trial_args:
            lines.append(_("trials add to {key}: {words}", key=key, words=" ".join(program.trial_args)))
        if keys := self.trial_keys(platform.task):
            lines.append(
                _("trials set keys of {file}: {keys}", file=self.config_of(platform.task.spec), keys=", ".join(keys))
            )
        return lines

    # Logs

    def _needs_clock(self) -> bool:
        log = self.described.log
        if log.step:
            return not re.compile(log.step).groupindex.keys() & {*sections.UNITS}
        return log.format is not None and log.format not in logs.TIMED

    def patterns(self) -> logs.Patterns:
        """Return the patterns of the program's log."""
        log = self.described.log
        formats = (log.format,) if log.format else logs.TIMED
        steps = (log.step,) if log.step else [logs.FORMATS[name] for name in formats]
        printed = {name: row.printed for name, row in self.described.knobs.items() if row.printed}
        return logs.Patterns(steps=steps, loss=log.loss, memory_gib=log.memory_gib or logs.MEMORY_GIB, printed=printed)

    def steps(self, task: Task, folder: str) -> Steps:
        return Steps(logs.Log(folder, task, self.patterns()), limit=task.spec.control.train_iters)

    def read(self, task: Task, candidate: Candidate, folder: str, *, partial: bool = False) -> Measurement:
        log = logs.Log(folder, task, self.patterns())
        log(unfinished=True)
        if log.too_slow:
            raise NoMetrics(log.too_slow)
        times = tuple(log.times.values())
        if not times and (stated := log.unusable):
            problem = f"the log states {stated[0]} as the time or rate of a step, not one finite number above 0"
            raise NoMetrics(f"unusable step time: {problem}{log.note}")
        if not times:
            pattern = self.described.log.step
            fix = "correct" if pattern else "give"
            problem = f"no line of the log {'matches train.program.log.step' if pattern else 'has a step time'}"
            if log.matched:
                problem = "the log has no second line of a step, from whose arrival times would follow"
            shown = f"; its last line is {log.last[:200]!r}" if log.last else ""
            raise NoMetrics(f"{problem}; {fix} train.program.log.step, the pattern of a line per step{shown}{log.note}")
        warmup = warmup_of_fewer(len(times), warmup_steps(times, task.spec.control.warmup_iters))
        return measurement(
            task, times, warmup, losses=log.losses, peak_allocated_bytes=log.peak_bytes, effective=self.effective(log)
        )

    def answers(self, task: Task, change: str, folder: str, baseline: str) -> Answers | None:
        records = []
        for each in (folder, baseline):
            log = logs.Log(each, task, self.patterns())
            log(unfinished=True)
            records.append(Record(log.losses, log.norms))
        return compared(task, change, *records)

    def effective(self, log: logs.Log) -> dict[str, KnobValue]:
        """Return the values that the program printed. A value that the knob does not list is text."""
        found: dict[str, KnobValue] = {}
        for name, text in log.values.items():
            row = self.described.knobs[name]
            by_text = {str(value).lower(): value for value in sections.values_of(row)}
            found[name] = by_text.get(text.strip().lower(), text)
        return found


COMMAND = Trainer("command")
