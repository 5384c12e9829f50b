"""The parts of the engine that the core asks for separately: bounds, plans, and the reader of commands."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flagcore.contracts import Bounds, Commands, Plans
from flagcore.domain.launch import Start
from flagcore.domain.space import KnobValue
from flagcore.domain.spec import ImportNote, SettingValue, Spec, Task
from flagcore_megatron import predict as prediction
from flagcore_megatron.mixed.planner import values_alone
from flagcore_megatron.program.user_command import starts_megatron
from flagcore_megatron.space import knobs, meshes, production


class MegatronBounds(Bounds):
    """Bounds for all values of the knobs of recompute."""

    knobs = tuple(knob.name for knob in knobs.SPACE_KNOBS if knob.name not in meshes.RECOMPUTE_KNOBS)

    seconds = staticmethod(prediction.least_seconds)
    share = staticmethod(prediction.least_share)


class MegatronPlans(Plans):
    """Plans as production jobs run: with settings of published recipes, on meshes of several node groups."""

    labels = prediction.LABELS

    def read_flags(self, text: str, spec: Spec) -> tuple[str, Mapping[str, SettingValue], Sequence[str]]:
        from flagcore_megatron.importing.command import read_flags  # other commands do not need it

        return read_flags(text, spec)

    in_space = staticmethod(knobs.in_space)
    runs_as = staticmethod(production.runs_as)
    assumed = staticmethod(production.assumed)
    without_command = staticmethod(production.without_command)
    unusual = staticmethod(production.unusual)
    model = staticmethod(prediction.model_parts)
    components = staticmethod(prediction.components)
    pipelines = staticmethod(prediction.pipelines)
    stage_layers = staticmethod(prediction.stage_layers)
    splits = staticmethod(meshes.splits)

    def space_alone(
        self, task: Task, group: int, space: Mapping[str, str | tuple[KnobValue, ...]]
    ) -> Mapping[str, str | tuple[KnobValue, ...]]:
        alone = {**values_alone(task, group), **space}
        return {name: values for name, values in alone.items() if name != meshes.MESHES}


class MegatronCommands(Commands):
    """Reads commands of Megatron-LM and of programs with its arguments."""

    keeps_scripts = True

    def role(self, command: Sequence[str], directory: str) -> str | None:
        return "" if starts_megatron(command, directory) else None

    def read(self, start: Start, directory: Path, model: str | None) -> tuple[dict[str, Any], Sequence[ImportNote]]:
        from flagcore_megatron.importing.command import spec_of_command  # other commands do not need it

        return spec_of_command(start, directory, model)
