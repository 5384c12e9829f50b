"""The profile of an engine: everything that the engine's package defines for the shared modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pkgutil import resolve_name

import numpy as np

from flagcore.domain.knob import Knob
from flagcore.domain.space import Axis, Columns, KnobValue, Merge, Rule
from flagcore.domain.spec import Task
from flagcore.errors import SpecError
from flagcore.vendorkit.programs import strip_dashes
from flagcore_serving.launch.reports import ServerReports
from flagcore_serving.launch.server import Instance, Router
from flagcore_serving.space import knobs as common_knobs
from flagcore_serving.space.hardware import TP
from flagcore_serving.space.program import Program
from flagcore_serving.space.settings import PublishedRuns, Settings


@dataclass(kw_only=True, eq=False)
class EngineProfile:
    """One serving engine: its program, rules, settings and overheads.

    Where releases of the engine differ, the engine version in the spec decides.
    """

    name: str
    where: str
    """The import path of the engine's `ServerReports`, as module:attribute, from which the trial program loads it."""
    program: Program
    modules: Mapping[str, str]
    """Modules that the server imports, each with its pip requirement."""
    rules: Callable[[Task], tuple[Rule, ...]]
    """Returns the engine's legality rules for candidates."""
    settings: Callable[[Task, Columns], Settings]
    server: Callable[[Task, Mapping[str, KnobValue], tuple[int, ...]], Instance]
    """Returns the server for a task, its knob values, and the CPU cores to use (empty for other devices)."""
    on_host: Callable[[int, str], tuple[str, ...]] | None = None
    """Returns the additional flags for one host of an instance. Arguments: the number of the instance's hosts, and the
    index of this host. None: an instance cannot span hosts.
    """
    host_address: str = ""
    """The variable with a host's address for the other hosts of an instance. Without it, the server uses the address of
    the default route."""
    of_kind: Callable[[Task, Mapping[str, KnobValue], str, Instance], Instance] | None = None
    """Returns an instance changed so that it only prefills or only decodes. None: the engine has no such servers."""
    protocol: Callable[[Task, Mapping[str, KnobValue]], str] = lambda task, values: ""
    """Returns the protocol by which prefill and decode servers exchange caches, as named in `load.routing`."""
    router: Callable[[Task, Mapping[str, KnobValue]], Router] = lambda task, values: Router.of_replicas(
        ("vllm-router",), prefix_aware=task.spec.serve.prefix_aware
    )
    """Returns the router in front of several servers. Raises UsageError if no router supports such servers."""
    merges: Callable[[Task], tuple[Merge, ...]] = lambda task: ()
    """Returns the merges: rules by which candidates that the engine treats as equal become one."""
    split_by: str = TP
    """The knob (TP or PP) that by default splits the weights over the minimum number of devices."""
    host_times: tuple[float, float] | None = None
    """Seconds of host overhead per iteration, and per sequence in an iteration, if devices are CPU cores."""
    receive_flag: str = ""
    """The flag for the number of iterations between two polls for new requests."""
    published_runs: PublishedRuns = field(default_factory=PublishedRuns)
    untested: str = ""
    """Why predictions for this engine are less certain. Empty if runs of the engine were measured."""
    plans_by_default: bool = False
    """As in `Engine`."""
    start_seconds: float = 1200.0
    """Timeout of a trial in seconds: servers load their weights and compile before the load begins."""
    knobs: tuple[Knob, ...] = field(init=False)
    images: Mapping[str, Sequence[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.knobs, self.images = self.program.knobs, self.program.images

    @cached_property
    def reports(self) -> ServerReports:
        """The API of the engine's server, and the format of its reports."""
        reports: ServerReports = resolve_name(self.where)
        return reports

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the axes of a task's knobs in the order of enumeration. Raises SpecError."""
        fixed = self.program.parse(task.spec).fixed
        if task.spec.serve.engine_args:
            self._check_fixed(task, self.program.parse(replace(task.spec, baseline=None)).fixed)
        return common_knobs.axes(task, self.knobs, fixed, self.program.version(task.spec))

    def _check_fixed(self, task: Task, fixed: Mapping[str, KnobValue]) -> None:
        """Raise SpecError if `engine_args` alone break a rule. The message names the keys as the user wrote them."""
        program, args = self.program, task.spec.serve.engine_args
        codes = {name: np.array([program.code(name, value)]) for name, value in fixed.items()}
        for rule in self.rules(task):
            if codes.keys() >= {*rule.knobs} and bool(rule.broken(codes).any()):
                knobs = {key: program.knob_of(program.full_name(strip_dashes(key)))[0] for key in args}
                problem, given = rule.message, {knob.name: key for key, knob in knobs.items() if knob}
                for name in rule.knobs:
                    problem = problem.replace(name, given.get(name, name))
                key = given.get(rule.knobs[0], rule.knobs[0])
                raise SpecError(key=f"serve.engine_args.{key}", value=args.get(key), problem=f"is invalid: {problem}")
