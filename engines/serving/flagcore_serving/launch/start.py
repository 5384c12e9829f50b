"""How the servers of an engine are started: as a trial, or as the servers of the best configuration."""

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
from flagcore_importers.programs import strip_dashes

from flagcore.contracts import Engine, ExportJob, Platform
from flagcore.contracts.exchange import ADDRESS, DEVICES_OF_HOST
from flagcore.domain.engine import device_variables, without_devices
from flagcore.domain.knob import Knob
from flagcore.domain.launch import Launch, ServerGroup, ServerGroups
from flagcore.domain.secrets import secrets_in_arguments
from flagcore.domain.space import Axis, Candidate, Columns, KnobValue
from flagcore.domain.spec import Task
from flagcore.errors import LaunchError, SpecError, UsageError
from flagcore.i18n import _
from flagcore_serving.job import ServeSpec
from flagcore_serving.launch import export
from flagcore_serving.launch.reports import ServerReports
from flagcore_serving.launch.server import ENCODER_URLS, ROUTER_HEALTH, SERVE, Instance, Router, TrialJob, as_text
from flagcore_serving.load.result import MinRate
from flagcore_serving.load.routing import ENCODE
from flagcore_serving.load.traffic import in_flight
from flagcore_serving.space import knobs as common_knobs
from flagcore_serving.space.hardware import INSTANCES, PREFILL_DECODE, TP, Hardware, count
from flagcore_serving.space.placement import Placement, placements
from flagcore_serving.space.program import Program
from flagcore_serving.space.settings import PublishedRuns, Settings

PROGRAM = "flagcore_serving.trial"
OWN_ADDRESS = "{own_address}"
"""Placeholder in a `ServerGroup` for the address of the host on which a server runs."""
HOST_PROGRAM = f"{PROGRAM}.host"
BY_DEFAULT = "_by_default"
"""The end of the names of merges that treat the engine's own value of a knob as not set."""
STOPPABLE = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
"""Objectives whose loads may be stopped early. The rate of an open loop follows from its arrivals."""


class EngineProfile(Engine):
    """A serving engine as its servers see it: its program, rules and settings, and how its servers are started.

    An engine must define `name`, `where`, `program`, `settings` and `server`. Where releases of the engine differ, the
    engine version in the spec decides.
    """

    kind = "serve"
    where: str
    """The import path of the engine's `ServerReports`, as module:attribute, from which the trial program loads it."""
    program: Program
    host_address: str = ""
    """The variable with a host's address for the other hosts of an instance. Without it, the server uses the address of
    the default route."""
    split_by: str = TP
    """The knob (TP or PP) that by default splits the weights over the minimum number of devices."""
    host_times: tuple[float, float] | None = None
    """Seconds of host overhead per iteration, and per sequence in an iteration, if devices are CPU cores."""
    receive_flag: str = ""
    """The flag for the number of iterations between two polls for new requests."""
    published_runs: PublishedRuns = PublishedRuns()

    def __init__(self) -> None:
        self.knobs = self.program.knobs

    @abstractmethod
    def settings(self, task: Task, columns: Columns) -> Settings:
        """Return the effective settings of each candidate."""

    @abstractmethod
    def server(self, task: Task, values: Mapping[str, KnobValue], cores: tuple[int, ...]) -> Instance:
        """Return the server for knob values. `cores`: the CPU cores to use, empty for other devices."""

    def on_host(self, hosts: int, rank: str) -> tuple[str, ...]:
        """Return the additional flags for the host with index `rank` of an instance on several `hosts`.

        By default there are none: an instance cannot span hosts.
        """
        return ()

    def of_kind(self, task: Task, values: Mapping[str, KnobValue], kind: str, instance: Instance) -> Instance:
        """Return an instance changed for its kind: it only encodes, prefills or decodes, or others encode its images.

        By default unchanged: the engine has no such servers.
        """
        return instance

    def protocol(self, task: Task, values: Mapping[str, KnobValue]) -> str:
        """Return the protocol by which prefill and decode servers exchange caches, as named in `load.routing`."""
        return ""

    def router(self, task: Task, values: Mapping[str, KnobValue]) -> Router:
        """Return the router in front of several servers. Raises UsageError if no router supports such servers."""
        return Router.of_replicas(("vllm-router",), prefix_aware=task.spec.serve.prefix_aware)

    def form(self, instance: Instance) -> Instance:
        """Return an instance with its flags in the form that the engine reads, such as a file. By default unchanged."""
        return instance

    @cached_property
    def reports(self) -> ServerReports:
        """The API of the engine's server, and the format of its reports."""
        reports: ServerReports = resolve_name(self.where)
        return reports

    def parse(self, values: Mapping[str, object]) -> dict[str, KnobValue]:
        """Parse the knob values of a spec or a job record. Raises SpecError for an unknown knob or an invalid value."""
        return common_knobs.parse(values, self.knobs, self.name)

    def axes(self, task: Task) -> tuple[Axis, ...]:
        """Return the axes of a task's knobs in the order of enumeration. Raises SpecError."""
        fixed = self.program.parse(task.spec).fixed
        if given := task.spec.serve.engine_args and self.program.parse(replace(task.spec, baseline=None)).fixed:
            self._check_fixed(task, given)
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

    def started(
        self, platform: Platform, candidate: Candidate, folder: str, figures: Mapping[str, float], *, for_real: bool
    ) -> Launch:
        """Write the files of `candidate` into `folder`, and return its launch. Raises LaunchError.

        `figures`: predicted metrics; a trial's search for the highest load starts near the predicted load. `for_real`:
        whether to start the servers of the final configuration instead of a trial.
        """
        instances = self.instances(platform, candidate, is_public=bool(platform.task.spec.serve.elsewhere))
        try:
            if for_real:
                return self._real(platform, candidate, folder, instances)
            return self._trial(platform, candidate, folder, instances, figures)
        except UsageError as error:
            if for_real:
                raise
            raise LaunchError(str(error)) from None
        except OSError as error:
            raise LaunchError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from None

    def _real(self, platform: Platform, candidate: Candidate, folder: str, instances: tuple[Instance, ...]) -> Launch:
        """Return the launch of the final configuration, and write its script. Raises UsageError and OSError."""
        spec, serve = platform.task.spec, platform.task.spec.serve
        router = self.router_of(platform, candidate, len(instances))
        hosts = spec.cluster.hosts if spec.on_each_host else ()
        if not hosts and any(each.host or each.further for each in instances):
            raise UsageError(_("servers on several hosts need cluster.hostfile and auto_tuner.launcher"))
        in_image, programs = serve.elsewhere == "image", "" if serve.elsewhere else str(Path(sys.executable).parent)
        place = (folder, serve.directory or folder, self.reports.health, hosts, router)
        started = export.launch(instances, *place, in_image=in_image, programs=programs)
        if started.script and not serve.elsewhere:
            _write_script(started.script, Path(folder, export.START), instances)
        return started

    def _trial(
        self,
        platform: Platform,
        candidate: Candidate,
        folder: str,
        instances: tuple[Instance, ...],
        figures: Mapping[str, float],
    ) -> Launch:
        """Write the job of a trial, and return the launch of the trial program. Raises UsageError and OSError."""
        task, spec, serve = platform.task, platform.task.spec, platform.task.spec.serve
        spread = len({each.host for each in instances}) > 1
        if spread and any(ENCODER_URLS in each.argv for each in instances):
            raise UsageError(_("a trial starts servers that encode images on the host of the others only"))
        job = TrialJob(
            engine=self.where,
            instances=instances,
            loads=tuple(in_flight(load) for load in serve.loads),
            vocab_size=spec.model.vocab_size,
            timeout_s=spec.control.max_time_per_task or serve.start_seconds,
            repeats=serve.repeats,
            slo=serve.slo,
            asked=(*serve.slo, spec.objective),
            highest=serve.highest,
            start=_first_load(serve, figures),
            predicted_s=figures.get("e2e_s.mean") if len(serve.loads) == 1 else None,
            min_rate=_min_rate(task),
            patterns=platform.failure_patterns,
            directory=serve.directory or folder,
            versions={self.name: self.program.version(spec)},
            hosts=spec.cluster.hosts[: spec.cluster.nodes] if spec.on_each_host else (),
            protocol=self.protocol(task, candidate.as_dict()),
            prefix_aware=serve.prefix_aware,
            answers=spec.control.answers is not None,
        )
        file = Path(folder, SERVE)
        if any(secrets_in_arguments(each.argv) for each in instances):
            file.touch(mode=0o600)
        file.write_text(as_text(job), encoding="utf-8")
        program = (sys.executable, "-m", PROGRAM, folder)
        if not job.hosts:
            return Launch(argv=program, folder=folder)
        on_host = (sys.executable, "-m", HOST_PROGRAM, folder, "{node_rank}", "{node_ports}")
        return Launch(argv=on_host, client=program, folder=folder)

    def instances(self, platform: Platform, candidate: Candidate, *, is_public: bool = False) -> tuple[Instance, ...]:
        """Return the servers of a candidate.

        `is_public`: whether others will see the commands. Raises UsageError if a public command contains a secret.
        """
        values = candidate.as_dict()
        instances = tuple(self._instance(platform, values, each) for each in placements(platform.task, values))
        if is_public and any(secrets_in_arguments(each.argv) for each in instances):
            raise UsageError("the command contains a secret; pass it in a variable")
        return instances

    def router_of(self, platform: Platform, candidate: Candidate, count: int) -> Router | None:
        """Return the router in front of `count` instances, or None if it needs none. Raises UsageError."""
        values, is_aware = candidate.as_dict(), platform.task.spec.serve.prefix_aware
        return self.router(platform.task, values) if values.get(PREFILL_DECODE) or (count > 1 and is_aware) else None

    def export(self, job: ExportJob, target: str) -> Mapping[str, str]:
        """Return the files of an export to docker compose, by name. Raises UsageError."""
        task, support = job.platform.task, job.platform.support
        instances = self.instances(job.platform, job.candidate, is_public=True)
        if any(each.further or each.host for each in instances):
            raise UsageError("--to compose starts servers on one host only; use --to slurm or dynamo")
        container = support.container
        if container and container.selects:
            instances = tuple(
                replace(each, environment=without_devices(support, each.environment)) for each in instances
            )
        variables = {**job.platform.environment, **task.spec.envs}
        common = {key: value for key, value in variables.items() if not any(each in value for each in DEVICES_OF_HOST)}
        known = container is not None or support.shared_devices
        note = "Put the device settings of the vendor's container runtime into compose.override.yaml."
        text = export.compose_file(
            instances,
            self.reports.health,
            directory=task.spec.serve.directory,
            weights=task.spec.serve.weights or "",
            common=common,
            comments=job.comments if known else (*job.comments, note),
            router=self.router_of(job.platform, job.candidate, len(instances)),
            image=job.options.get("image", job.image),
            devices=container.service if container else {},
        )
        return {export.COMPOSE: text}

    def servers(self, platform: Platform, candidate: Candidate, name: str) -> ServerGroups | tuple[Candidate, int]:
        """Return the groups of identical servers, or the candidate of one if they need no router and one host each.

        See `Engine.servers`. Raises UsageError if the target cannot start such servers.
        """
        values, on_cores = candidate.as_dict(), Hardware.of(platform.task).on_cores
        instances = self.instances(platform, candidate)
        router = self.router_of(platform, candidate, len(instances))
        spans = any(each.further for each in instances)
        if not (router or spans) or (on_cores and not values.get(PREFILL_DECODE)):
            return Candidate.of({**values, INSTANCES: 1}), count(values, INSTANCES)
        _check_target(instances, on_cores=on_cores)
        placed = list(zip(instances, placements(platform.task, values), strict=True))
        count_of = Counter(each.kind for each in instances)
        encoders = [f"http://{host}:{export.FRONT_PORT}" for host in _names(name, ENCODE, count_of[ENCODE])]
        groups, addresses = list[ServerGroup](), list[tuple[str, str, int]]()
        for kind, replicas in count_of.items():
            instance, place = next(each for each in placed if each[0].kind == kind)
            groups.append(self._group(platform, instance.with_encoders(encoders), place, replicas))
            addresses += [(kind, host, export.FRONT_PORT) for host in _names(name, groups[-1].name, replicas)]
        if router is None:
            return ServerGroups(groups=tuple(groups), front=None)
        front = router.instance(addresses).at_port(export.FRONT_PORT)
        ready = (f"http://127.0.0.1:{export.FRONT_PORT}{ROUTER_HEALTH}",)
        return ServerGroups(groups=tuple(groups), front=Launch(argv=front.argv, folder="", ready=ready))

    def _group(self, platform: Platform, instance: Instance, place: Placement, replicas: int) -> ServerGroup:
        """Return the group of `replicas` servers such as `instance`, each of which finds its own address."""
        hosts = len(place.hosts)
        if hosts > 1 and (of_head := self.on_host(hosts, "0")):
            own = instance.argv[: -len(of_head)]
            instance = replace(instance, further=((*own, *self.on_host(hosts, "{node_rank}")),))
        instance = instance.filled({ADDRESS: OWN_ADDRESS})
        first = instance.at_head(OWN_ADDRESS, str(export.MEETING_PORT)).at_port(export.FRONT_PORT)
        environment = without_devices(platform.support, first.environment)
        ready = (f"http://127.0.0.1:{export.FRONT_PORT}{self.reports.health}",)
        return ServerGroup(
            name=instance.kind or "server",
            launch=Launch(argv=first.argv, environment=environment, folder="", ready=ready),
            devices=place.width // hosts,
            replicas=replicas,
            hosts=hosts,
            others=first.further[0] if hosts > 1 else (),
        )

    def _instance(self, platform: Platform, values: Mapping[str, KnobValue], placement: Placement) -> Instance:
        """Return one server of a candidate with its devices. The user's environment variables override the engine's."""
        task = platform.task
        cores = Hardware.of(task).cores(placement.first, placement.width)
        instance = self.server(task, placement.values, cores)
        explicit = self._explicit(task, placement.values, instance.argv)
        instance = self.form(replace(instance, argv=(*instance.argv, *explicit)))
        if values.get(PREFILL_DECODE):
            instance = self.of_kind(task, values, placement.kind, instance)
        is_exported = bool(task.spec.serve.elsewhere)
        spans = {self.host_address: ADDRESS} if len(placement.hosts) > 1 and self.host_address else {}
        environment = {
            name: value for name, value in {**instance.environment, **spans}.items() if name not in task.spec.envs
        }
        number, names = placement.hosts[0], dict(enumerate(task.spec.cluster.hosts))
        devices = platform.devices_of(names.get(number, f"node {number}") if task.spec.on_each_host else "")
        own_devices = devices[placement.first : placement.first + placement.width]
        if not is_exported or [each.selector for each in own_devices] != [*map(str, range(len(devices)))]:
            environment |= device_variables(platform.support, own_devices)
        neutral = {axis.knob: axis.neutral for axis in self.axes(task)}  # values that the engine uses if nothing is set
        set_values = {knob: value for knob, value in placement.values.items() if value not in (None, neutral.get(knob))}
        argv, other_argvs, hosts = instance.argv, list[tuple[str, ...]](), len(placement.hosts)
        if hosts > 1:
            argv, *other_argvs = [(*argv, *self.on_host(hosts, str(rank))) for rank in range(hosts)]
        return replace(
            instance,
            argv=argv,
            environment=environment,
            cores=cores,
            devices=() if cores else tuple(each.selector for each in own_devices),
            requested=set_values,
            host=number,
            further=tuple(other_argvs),
            kind=placement.kind,
        )

    def _explicit(self, task: Task, values: Mapping[str, KnobValue], argv: Sequence[str]) -> tuple[str, ...]:
        """Return the arguments by which the user set the engine's own values, which the candidate's `values` leave out.
        They stay, because the values of another release may differ. `argv`: the command without these arguments."""
        words, version = list[str](), self.program.version(task.spec)
        given = {**self.parse(task.spec.baseline or {}), **self.program.parse(task.spec).fixed}
        for knob in self.knobs:
            value, chosen = given.get(knob.name), values.get(knob.name)
            is_same = chosen == value == knob.neutral or (chosen is None and self._is_own(task, values, knob, value))
            if is_same and value is not None:
                own_words = replace(knob, passes_neutral=True).arguments(value, version)
                words += own_words if own_words and own_words[0] not in argv else ()
        return tuple(words)

    def _is_own(self, task: Task, values: Mapping[str, KnobValue], knob: Knob, value: KnobValue) -> bool:
        """Return whether `value` is the engine's own value of a knob for a candidate with `values`."""
        by_name, own_values = {each.name: each for each in self.knobs}, {**values, knob.name: value}
        for merge in self.merges(task):
            if knob.name in merge.knobs and merge.name.endswith(BY_DEFAULT):
                codes = {name: common_knobs.code(by_name[name], own_values.get(name)) for name in merge.knobs}
                columns = merge.canonical({name: np.array([code]) for name, code in codes.items()})
                if value is not None and not columns.get(knob.name, np.ones(1)).any():
                    return True
        return False


def _names(name: str, group: str, count: int) -> list[str]:
    """Return the host names of the servers of a group of the job `name`."""
    return [f"{name}-{group}-{number}.{name}-{group}" for number in range(count)]


def _write_script(script: str, file: Path, instances: Sequence[Instance]) -> None:
    """Write the start script of `instances`. Only the owner can read it if it contains a secret. Raises OSError."""
    has_secret = any(secrets_in_arguments(each.argv) for each in instances)
    file.touch(mode=0o600)
    file.write_text(f"#!/bin/bash\n{script}", encoding="utf-8")
    file.chmod(0o700 if has_secret else 0o755)


def _min_rate(task: Task) -> MinRate | None:
    """Return the rate below which the trial is stopped, or None if it may not be stopped or has several loads."""
    serve, objective = task.spec.serve, task.spec.objective
    is_stoppable = objective in STOPPABLE and len(serve.loads) == 1 and serve.highest is None
    if task.stop_above_s is None or not is_stoppable or serve.loads[0].request_rate is not None:
        return None
    return MinRate(objective, 1.0 / task.stop_above_s)


def _first_load(serve: ServeSpec, figures: Mapping[str, float]) -> float:
    """Return the load at which a search starts: the predicted request rate or, by Little's law, requests in flight."""
    if serve.highest is None:
        return 1.0
    rate = figures.get("requests_per_s") or 1.0
    return rate if serve.highest == "request_rate" else max(1.0, rate * (figures.get("e2e_s.mean") or 1.0))


def _check_target(instances: Sequence[Instance], *, on_cores: bool) -> None:
    """Raise UsageError if servers cannot be started one by one on a target: see `Engine.servers`."""
    if on_cores:
        raise UsageError("this target starts servers on devices only")
    if any(secrets_in_arguments(each.argv) for each in instances):
        raise UsageError("the command contains a secret; pass it in a variable")
    if any(each.kind == ENCODE for each in instances) and not any(ENCODER_URLS in each.argv for each in instances):
        raise UsageError("this target starts servers on several hosts, but embeddings pass through a folder")
