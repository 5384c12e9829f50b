"""The engine `torchtitan`: a user's torchtitan command, whose candidates are further options of it.

Source: torchtitan 0.3 `config/configs.py`, `config/manager.py` and `trainer.py`. Options change the values of a
configuration. Activation checkpointing is a subcommand, so it is the last word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flagcore_importers.dialect import flat, name_of
from flagcore_importers.values import count_of
from flagcore_training.commands import parse

from flagcore.contracts import Commands, Costs, Engine, Platform
from flagcore.domain.engine import Unmodelled
from flagcore.domain.knob import in_versions
from flagcore.domain.launch import Launch, Start
from flagcore.domain.prediction import Predictions
from flagcore.domain.space import BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue, Rule
from flagcore.domain.spec import Spec, Task
from flagcore.errors import SpecError
from flagcore.i18n import N_, Message, _
from flagcore.spec.plain_data import package_yaml
from flagcore_trainers import fully_shard as fs
from flagcore_trainers import importing, meaning, start
from flagcore_trainers.fully_shard import predict as prediction
from flagcore_trainers.fully_shard.traffic import TORCHTITAN as TORCHTITAN_PROGRAM
from flagcore_trainers.meaning import ACCUMULATION
from flagcore_trainers.start import CONFIG_FILE, option, read_toml
from flagcore_trainers.trainer import Trainer


def replicas_of_torchtitan(words: Sequence[str], content: Mapping[str, Any]) -> tuple[str, int]:
    """Return the key with the number of copies of the sharded weights, and the number: 1 without such a key."""
    key, value = importing.first_of(importing.titan(words, content), "replicate")
    return key, count_of(value)


def stage_micro_batch(words: Sequence[str], content: Mapping[str, Any]) -> tuple[str, int]:
    """Return the key of the samples of a micro-batch of torchtitan's pipelines, and their number: by default 1."""
    read = importing.titan(words, content)
    return importing.TITAN.keys["pipeline_micro_batch"][0], read.number("pipeline_micro_batch") or 1


def lacks_graphs(words: Sequence[str], content: Mapping[str, Any]) -> bool:
    """Return whether torchtitan refuses a command because of CUDA graphs, which are on since 0.3.

    They support no pipelines, and of the dispatchers of experts only those without exchanges with the host. Source:
    torchtitan 0.3.0 `trainer.py`, `_validate_cuda_graphs`.
    """
    given = {**dict(flat(content)), **{name_of(name): value for name, value in importing.options_of(words).items()}}
    named = (CONFIG_FILE, "training.disable_cuda_graphs")
    if any(name_of(each) in map(name_of, given) for each in named):
        return False
    if (importing.titan(words, content).number(fs.PP) or 1) > 1:
        return True
    is_static = re.search("hybridep|minimal_async_ep", str(given.get("config")))
    return count_of(option(words, "parallelism.expert_parallel_degree")) > 1 and not is_static


CHECKPOINTING = "activation-checkpoint:"
"""The start of the subcommand of activation checkpointing."""
_REPLICAS = "replicas share weights and states among fewer ranks than predicted: more memory, other exchange"
NO_GRAPHS = "--training.disable_cuda_graphs"
COMPILE_FLAG = "--compile.enable"
OWN_MODELS = N_("torchtitan has only the models of its registry: a job needs train.command, with --module and --config")
PROGRAM: Mapping[str, Any] = package_yaml(__package__, "torchtitan.yaml")


class TitanCommands(Commands):
    """Reads commands of torchtitan."""

    keeps_scripts = True

    def role(self, command: Sequence[str], directory: str) -> str | None:
        return "" if importing.starts_torchtitan(parse(command, directory)) else None

    def read(self, start: Start, directory: Path, model: str | None) -> importing.Imported:
        return importing.spec_of_torchtitan(start, directory, model, list(PROGRAM["knobs"]))


class TorchTitan(Trainer):
    """Training with torchtitan, whose replicas share weights with FSDP2."""

    commands = TitanCommands()
    distribution = "torchtitan"
    modules: Mapping[str, str] = {"torchtitan": "torchtitan"}
    releases = ">=0.1,<0.4"

    def with_program(self, program: object) -> Engine:
        """Return the engine with further knobs and arguments of `program`."""
        program = {} if program is None else program
        if not isinstance(program, Mapping):
            return super().with_program(program)
        merged, known = {**PROGRAM, **program}, PROGRAM["knobs"]
        if isinstance(knobs := merged["knobs"], Mapping):
            own = {each: {**known.get(each, {}), **row} for each, row in knobs.items() if isinstance(row, Mapping)}
            merged["knobs"] = {**known, **knobs, **own}
        return super().with_program(merged)

    def unmodelled(self, task: Task) -> Sequence[Unmodelled]:
        given = self._given(task.spec)
        key, replicas = replicas_of_torchtitan(*given)
        effects = importing.effects_of_torchtitan(*given)
        if replicas > 1 and self._is_like_zero(task):
            effects.append(Unmodelled(name=key, why=_REPLICAS, time=(0.8, 1.2)))
        return effects

    def rules(self, task: Task) -> tuple[Rule, ...]:
        given = self._given(task.spec)
        key, replicas = replicas_of_torchtitan(*given)
        rules, knobs = super().rules(task), tuple(knob.name for knob in self.knobs if knob.layout)
        of_stage, size = stage_micro_batch(*given)
        if self.described.numbers.get(fs.PP, 1) > 1 and size > 1:
            text = Message(N_("{key} = {size} must divide the local batch"), key=of_stage, size=size)
            rest = partial(self._rest, task, fs.MBS, size)
            rules = (*rules, Rule(name="stage_micro_batch", knobs=(fs.MBS,), message=text, broken=rest))
        if replicas == 1:
            return rules
        message = Message("{key} = {replicas} must divide the data-parallel ranks", key=key, replicas=replicas)
        rest = partial(self._rest, task, "data_parallel_size", replicas)
        return (*rules, Rule(name="replicas", knobs=knobs, message=message, broken=rest))

    def _rest(self, task: Task, name: str, size: int, columns: Columns) -> BoolArray:
        """Return whether a number of each candidate is no multiple of `size`."""
        return np.not_equal(self.numbers(task, columns)[name] % size, 0)

    def _given(self, spec: Spec) -> tuple[Sequence[str], Mapping[str, Any]]:
        """Return the words of the command and of the spec's flags, and the content of the command's TOML file."""
        command = self.command(spec)
        file = option(command.words, CONFIG_FILE)
        content = {} if file is None else read_toml(str(file), Path(command.directory))
        words = (*command.words, *spec.train.flags)
        return (*words, *[NO_GRAPHS] * lacks_graphs(words, content)), content

    def task_warnings(self, task: Task) -> Sequence[str]:
        words, _content = self._given(task.spec)
        text = _("candidates have {flag}: CUDA graphs of torchtitan 0.3 refuse this layout", flag=NO_GRAPHS)
        added = NO_GRAPHS not in (*self.command(task.spec).words, *task.spec.train.flags) and NO_GRAPHS in words
        lines = [*super().task_warnings(task), *[text] * added]
        return lines if task.spec.train.command else [*lines, _(OWN_MODELS)]

    def _is_like_zero(self, task: Task) -> bool:
        """Return whether predictions are those of ZeRO 3, as the model has parts that the engine `fsdp2` has not."""
        model = task.spec.model
        return bool(fs.missing_parts(model) or model.mtp_num_layers or model.experts)

    def command(self, spec: Spec) -> start.Command:
        """Return the user's command, or an empty one in a plan without it. Raises SpecError if its TOML file cannot be
        read, or the program has no options of releases with such files.
        """
        if spec.train.command is None:
            return start.Command(words=(), directory=".")
        command, checkpointing = super().command(spec), self.described.knobs.get(fs.AC)
        if (file := option(command.words, CONFIG_FILE)) is None:
            return command
        read_toml(str(file), Path(command.directory))
        if checkpointing and (checkpointing.flag or "").startswith(CHECKPOINTING):
            problem = f"lacks the options of releases with --{CONFIG_FILE}"
            fix = "write the spec with `flag import -- COMMAND`, which reads that file"
            raise SpecError(key="train.program", problem=problem, fix=fix)
        return command

    def predict(self, task: Task, columns: Columns, costs: Costs) -> Predictions:
        """Return the predictions of the engine `fsdp2`, or those of ZeRO 3 for models that it does not have.

        A local batch of a pipeline is divided into micro-batches, after which all stages wait, and gradients are
        reduced. Its weights stay gathered by default (torchtitan 0.3.0 `trainer.py` and `distributed/fsdp.py`).
        """
        numbers = self.numbers(task, columns)
        pipeline, passes = numbers[fs.PP], numbers[ACCUMULATION]
        if (pipeline > 1).any():
            size = np.minimum(stage_micro_batch(*self._given(task.spec))[1], numbers[fs.MBS])
            numbers = {**numbers, fs.MBS: size, ACCUMULATION: numbers[fs.MBS] // size}
            return _repeated(self._predict(task, columns, costs, numbers), passes)
        return self._predict(task, columns, costs, numbers)

    def _predict(self, task: Task, columns: Columns, costs: Costs, numbers: Mapping[str, IntArray]) -> Predictions:
        if self._is_like_zero(task):
            parts = self._loss_parts(task.spec)
            return meaning.predict(task, numbers, costs, self.described.state_bytes, loss_parts=parts)
        pipeline, replicas = numbers[fs.PP], replicas_of_torchtitan(*self._given(task.spec))[1]
        ones = np.ones_like(pipeline)

        def is_value(name: str, value: KnobValue) -> IntArray:
            knob = next((each for each in self.knobs if each.name == name), None)
            if knob is None or name not in columns:
                return 0 * ones
            code = knob.axis(()).encode(value)
            return np.where(columns[name] == code, ones, 0)

        given = {
            fs.REPLICATE: replicas * ones,
            fs.SHARD: np.maximum(numbers["data_parallel_size"] // replicas, 1),
            fs.TP: numbers[fs.TP],
            fs.CP: numbers[fs.CP],
            fs.PP: pipeline,
            fs.COUNT: numbers[ACCUMULATION],
            fs.EP: ones,
            fs.SCHEDULE: ones,
            fs.MBS: numbers[fs.MBS],
            fs.AC: 1 + numbers["recompute"],
            fs.RESHARD: np.where(pipeline > 1, 0, 1 - is_value(fs.RESHARD, "never")),
            fs.REDUCE: ones,
            fs.STATES: ones,
            fs.OFFLOAD: 0 * ones,
            fs.COMPILE: is_value(fs.COMPILE, True),
        }
        program = replace(TORCHTITAN_PROGRAM, loss_parts=self._loss_parts(task.spec))
        return prediction.predict(task, given, costs, program)

    def _loss_parts(self, spec: Spec) -> float:
        """Return the parts of the tokens of which head and loss run one after another: 8 in all models' configurations.

        Source: torchtitan 0.3.0 `components/loss.py`, `ChunkedLossWrapper`. Earlier releases have whole logits.
        """
        words, _content = self._given(spec)
        if option(words, CONFIG_FILE) is not None or not in_versions(">=0.3", spec.train.engine_version):
            return 1.0
        return float(option(words, "loss.num_chunks") or 8.0)

    def launch(self, platform: Platform, candidate: Candidate, folder: str, *, for_real: bool = False) -> Launch:
        train = platform.task.spec.train
        length, samples = train.seq_length, train.global_batch_size
        sizes = {"global_batch_size": samples, "seq_len": length}
        if self.described.knobs[fs.MBS].flag == f"--{importing.TOKENS}":
            sizes = {"num_tokens_per_train_step": samples * length, "max_context_length": length}
        work = (word for name, size in sizes.items() for word in (f"--training.{name}", str(size)))
        spec = replace(platform.task.spec, work=replace(train, flags=(*work, *train.flags)))
        platform = replace(platform, task=replace(platform.task, spec=spec))
        launch = super().launch(platform, candidate, folder, for_real=for_real)
        row = self.described.knobs.get(fs.COMPILE)
        given = (*launch.argv, *[NO_GRAPHS] * (NO_GRAPHS in self._given(spec)[0] and NO_GRAPHS not in launch.argv))
        section, dot, name = ((row and row.flag) or "").rpartition(".")
        off = f"{section}{dot}no-{name}" if name else ""  # such as --compile.no-enable
        argv = [word for word in given if word != off]
        if off and row and candidate.as_dict()[fs.COMPILE] is False and (row.flag == COMPILE_FLAG or row.default):
            argv.append(off)
        return replace(launch, argv=tuple(sorted(argv, key=lambda word: word.startswith(CHECKPOINTING))))


def _repeated(found: Predictions, passes: IntArray) -> Predictions:
    """Return predictions of steps of several passes through a pipeline, with one update of the weights."""
    time_s = {name: each * np.where(name == "optimizer_s", 1, passes) for name, each in found.time_s.items()}
    total: FloatArray = sum(time_s.values(), np.zeros(()))
    low, high = (each / found.step_time_s * total for each in (found.low_s, found.high_s))
    return replace(found, step_time_s=total, low_s=low, high_s=high, time_s=time_s)


TORCHTITAN = TorchTitan("torchtitan").with_program(None)
