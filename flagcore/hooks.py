"""The hooks: all that a plugin can tell the core, on one page.

A plugin is a module (or object) whose functions carry `@hookimpl`, named by an entry point in the group
`flagcore.plugins`. Each hook is optional. Hooks are asked at the edges, once a chip, task or trial, never
once a candidate; they answer with plain data or an object that the hot loop calls directly. Unless a
docstring says otherwise, a hook may raise anything: the failure is kept, shown by `flag plugins list`, and
costs only this plugin's answer. Where one answer is wanted, the first that is not None wins; plugins are
asked in the order of their names, the one that catalogues the chip last, so that an add-on can override it.
Each plugin is asked on its own, so pluggy's wrappers, tryfirst and trylast change nothing.

`engine` is the name of an installed engine, `kind` what that engine does: "train" or "serve". A plugin that answers by
`kind` needs no change for an engine that it has never heard of. An implementation may leave out any argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pluggy

from flagcore.contracts import CollectiveCosts, KernelCosts, MemoryModel, PruningRule, Telemetry
from flagcore.domain.chip import Chip, Device
from flagcore.domain.cluster import NodeGroup, Topology
from flagcore.domain.engine import EngineSupport
from flagcore.domain.knob import Knob
from flagcore.domain.launch import FailurePattern, Launch
from flagcore.domain.maturity import Maturity
from flagcore.domain.spec import Task
from flagcore.physics.collectives.curves import CollectiveTable

HOOKS_API = 1
"""The number of the hooks on this page. A plugin's module may say `HOOKS_API = 1` for those that it was written for:
one that was written for later hooks is left out, with the reason. It grows when a hook is removed, or asks for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """What a hook is called `now`. Its old name works, with a warning, before the release `until`."""

    now: str
    until: str


RENAMED: Mapping[str, Renamed] = {}
"""Hooks by their old names. An implementation under an old name takes any part of the arguments of the new one."""

hookspec = pluggy.HookspecMarker("flagcore")
hookimpl = pluggy.HookimplMarker("flagcore")


class ChipHooks:
    """What there is."""

    @hookspec
    def flagcore_devices(self) -> Sequence[Device] | None:
        """Return the devices of this vendor on this machine, in the order of their indices; None or empty if none.

        Memory in bytes. Asked once a command; must not take longer than a few seconds, import a framework
        or create a context on a device. A missing tool or driver means no devices, not an error.
        """

    @hookspec
    def flagcore_chips(self) -> Sequence[Chip] | None:
        """Return the chips that this plugin knows, found or not. Asked once a command.

        SI units, each figure with its source; what nobody published or measured is left out.
        """

    @hookspec
    def flagcore_maturity(self) -> Maturity | None:
        """Return how well founded what this plugin says is: run on devices, checked on transcripts, or from documents.

        Shown by `flag plugins list`, in full as JSON; None says nothing. Asked once a command that lists plugins.
        """

    @hookspec(firstresult=True)
    def flagcore_topology(self, group: NodeGroup) -> Topology | None:
        """Return the levels over which the devices of `group` talk, or None to derive them from the chip.

        Bytes per second in one direction, seconds. Asked once a task.
        """


class CostHooks:
    """What things cost."""

    @hookspec(firstresult=True)
    def flagcore_memory_model(self, group: NodeGroup, engine: str, kind: str) -> MemoryModel | None:
        """Return how a device of `group` spends memory under `engine`, or None if the chip is not yours.

        Bytes per device. Asked once a task, never per candidate. Without an answer the core takes what the
        device has, with 1.2 GB of context and 1% of fragments.
        """

    @hookspec(firstresult=True)
    def flagcore_kernel_costs(self, chip: Chip, engine: str, kind: str) -> KernelCosts | None:
        """Return measured or modelled kernel times, or None for a roofline from the chip's facts.

        Seconds; NaN for a shape that is not known: the roofline stands in there. Asked once a task; the object is
        called with columns.
        """

    @hookspec(firstresult=True)
    def flagcore_collective_costs(self, group: NodeGroup, engine: str) -> CollectiveCosts | CollectiveTable | None:
        """Return measured curves, or an object with times of its own, or None for the topology's latency and bandwidth.

        Seconds; NaN for what is not known: the topology stands in there. Curves hold among neighbouring devices;
        the core puts them on the topology. Asked once a task; an object is called with columns.
        """


class EngineHooks:
    """How to run an engine."""

    @hookspec(firstresult=True)
    def flagcore_engine_support(
        self, chip: Chip, engine: str, engine_version: str | None, kind: str
    ) -> EngineSupport | None:
        """Return whether and how `engine` runs on `chip`: torch device, backend, quirks; None if the chip is not yours.

        `engine_version` is what the spec says, else what is installed; None where nobody knows. Asked once a task. None
        from everybody means unknown, which is not no: it can be predicted, but not run.
        """

    @hookspec
    def flagcore_knobs(self, chip: Chip, engine: str, engine_version: str | None) -> Sequence[Knob] | None:
        """Return knobs that `engine` has on `chip` beside those that it has everywhere, or None.

        A spec's space may name them. All answers are joined; of two knobs of one name the first is kept, and one that
        has the name of a knob of the engine is refused. Asked once a task.
        """

    @hookspec
    def flagcore_environment(
        self, chip: Chip, engine: str, engine_version: str | None, task: Task | None, kind: str
    ) -> Mapping[str, str] | None:
        """Return environment variables that trials on `chip` need, or None if the chip is not yours.

        `task` tells how many nodes there are; it is None where the question is of the chip alone.

        All answers are joined. Of two values for one variable that of the plugin asked first wins, so an add-on
        overrides the chip's own plugin; the spec's `envs` override both. Asked once a task.
        """

    @hookspec
    def flagcore_pruning_rules(self, task: Task) -> Sequence[PruningRule] | None:
        """Return rules that say which candidates of `task` are not worth a trial, or None. Asked once a task.

        A rule sees the candidates in pieces, and judges each by itself. One that raises while it prunes is dropped
        for the run, and told.
        """

    @hookspec
    def flagcore_prepare_launch(self, launch: Launch, task: Task) -> Launch | None:
        """Return `launch` changed (a wrapper before argv, a variable, a limit), or None. Asked once a trial.

        Each plugin sees what the one before returned. Here the chip's own plugin is asked first, so that an
        add-on has the last word. An exception fails this trial only.
        """


class TrialHooks:
    """What happens while a trial runs and after it."""

    @hookspec
    def flagcore_failure_patterns(
        self, chip: Chip, engine: str, engine_version: str | None
    ) -> Sequence[FailurePattern] | None:
        """Return log patterns that say why a trial failed, or None if the chip is not yours. Asked once a task.

        Patterns of memory that ran out are tried first, then the others in order, the engine's own last; the
        first that matches any line decides.
        """

    @hookspec(firstresult=True)
    def flagcore_telemetry(self, device: Device) -> Telemetry | None:
        """Return something that reads `device` about once a second during a trial, or None. Asked once a device.

        Names end in their units: `memory_used_bytes`, `power_watts`. A reading that raises ends the telemetry of
        that device, not the trial.
        """
