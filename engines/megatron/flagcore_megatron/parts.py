"""The parts of the engine that the core asks for separately: bounds, plans, and the reader of commands."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore_training.frameworks import kept_framework

from flagcore.contracts import Bounds, Commands, Costs, Plans
from flagcore.domain.launch import Start
from flagcore.domain.model import Model
from flagcore.domain.prediction import Components, ModelPart, Passes, Predictions
from flagcore.domain.space import BoolArray, Candidate, Columns, FloatArray, IntArray, KnobValue
from flagcore.domain.spec import ImportNote, SettingValue, Spec, Task
from flagcore.domain.work import Work
from flagcore_megatron import predict as prediction
from flagcore_megatron.mixed.planner import values_alone
from flagcore_megatron.program.user_command import starts_megatron
from flagcore_megatron.space import knobs, meshes, production


class MegatronBounds(Bounds):
    """Bounds for all values of the knobs of recompute."""

    knobs = tuple(knob.name for knob in knobs.SPACE_KNOBS if knob.name not in meshes.RECOMPUTE_KNOBS)

    def seconds(self, task: Task, columns: Columns, costs: Costs) -> FloatArray:
        return prediction.least_seconds(task, columns, costs)

    def share(self, task: Task, columns: Columns, costs: Costs) -> FloatArray:
        return prediction.least_share(task, columns, costs)


class MegatronPlans(Plans):
    """Plans as production jobs run: with settings of published recipes, on meshes of several node groups."""

    labels = prediction.LABELS

    def read_flags(self, text: str, spec: Spec) -> tuple[str, Mapping[str, SettingValue], Sequence[str]]:
        from flagcore_megatron.importing.command import read_flags  # other commands do not need it

        return read_flags(text, spec)

    def in_space(self, values: Mapping[str, KnobValue], model: Model) -> Mapping[str, KnobValue]:
        return knobs.in_space(values, model)

    def only(self, spec: Spec) -> bool:
        has_no_program = spec.train.command is None and knobs.names_several_chips(spec)
        return has_no_program or kept_framework(spec) is not None

    def runs_as(self, spec: Spec) -> str:
        return production.runs_as(spec)

    def assumed(self, task: Task, candidate: Candidate) -> Mapping[str, SettingValue]:
        return production.assumed(task, candidate)

    def without_command(self, spec: Spec) -> Work:
        return production.without_command(spec)

    def unusual(self, task: Task, columns: Columns, predictions: Predictions) -> FloatArray:
        return production.unusual(task, columns, predictions)

    def model(self, task: Task) -> tuple[ModelPart, ...]:
        return prediction.model_parts(task)

    def components(self, task: Task, columns: Columns, stages: IntArray, costs: Costs) -> Components:
        return prediction.components(task, columns, stages, costs)

    def pipelines(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Passes]:
        return prediction.pipelines(task, columns, costs)

    def stage_layers(self, task: Task, columns: Columns, costs: Costs) -> Sequence[Sequence[int]]:
        return prediction.stage_layers(task, columns, costs)

    def space_alone(
        self, task: Task, group: int, space: Mapping[str, str | tuple[KnobValue, ...]]
    ) -> Mapping[str, str | tuple[KnobValue, ...]]:
        alone = {**values_alone(task, group), **space}
        return {name: values for name, values in alone.items() if name != meshes.MESHES}

    def splits(self, task: Task, columns: Columns) -> Mapping[str, BoolArray]:
        return meshes.splits(task, columns)


class MegatronCommands(Commands):
    """Reads commands of Megatron-LM and of programs with its arguments."""

    keeps_scripts = True

    def role(self, command: Sequence[str], directory: str) -> str | None:
        return "" if starts_megatron(command, directory) else None

    def read(self, start: Start, directory: Path, model: str | None) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        from flagcore_megatron.importing.command import spec_of_command  # other commands do not need it

        return spec_of_command(start, directory, model)
