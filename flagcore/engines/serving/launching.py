"""Starts a candidate: the trial program with a job, or the servers of the final configuration."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flagcore.contracts import ExportJob, Platform, ServerGroup, ServerGroups
from flagcore.domain.candidate import Candidate, KnobValue
from flagcore.domain.launch import Launch
from flagcore.domain.secrets import secrets_in_arguments
from flagcore.domain.spec import Spec
from flagcore.engines.serving import dynamo, export
from flagcore.engines.serving.common.hardware import PREFILL_DECODE, SIZES, Hardware
from flagcore.engines.serving.common.heterogeneous import Placement, placements
from flagcore.engines.serving.common.knobs import TRANSFER
from flagcore.engines.serving.load.images import check_format
from flagcore.engines.serving.load.traffic import in_flight, traffic
from flagcore.engines.serving.router import PREFIX
from flagcore.engines.serving.settings import PORT, SHARED
from flagcore.engines.serving.trial.job import SERVE, SHARED_FOLDER, Instance, Job, Router, as_text
from flagcore.errors import LaunchError, SpecError, UsageError
from flagcore.i18n import N_, _

if TYPE_CHECKING:
    from flagcore.engines.serving.engine import Engine

PROGRAM = "flagcore.engines.serving.trial"
OWN_ADDRESS = "{own_address}"
"""Placeholder of `ServerGroup` for the address of a server's host."""
HOST_PROGRAM = f"{PROGRAM}.host"


def ready(spec: Spec, engine: Engine) -> None:
    """Raise SpecError or NoDevice unless servers of `spec` can run here."""
    serve, cluster = spec.serve, spec.cluster
    if cluster.groups:
        chips, problem = [group.chip for group in cluster.groups], "are several chips, but one machine has one"
        fix = "predict with `flag estimate`"
        raise SpecError(key="cluster.groups", value=chips, problem=problem, fix=fix)
    if cluster.nodes > 1 and not spec.on_each_host:
        problem = "is more than one, but no launcher for several hosts is set"
        fix = "set auto_tuner.launcher and cluster.hostfile, or predict with `flag estimate`"
        raise SpecError(key="cluster.nodes", value=cluster.nodes, problem=problem, fix=fix)
    for load in serve.loads:
        traffic(in_flight(replace(load, num_prompts=1) if load.is_steady else load))
        if load.images is not None:
            check_format(load.images.format)
    if serve.directory is not None and not Path(serve.directory).is_dir():
        problem, fix = "is not a folder, but serve.command starts there", "use an existing folder, or remove it"
        raise SpecError(key="serve.directory", value=serve.directory, problem=problem, fix=fix)
    if spec.objective == "goodput_requests_per_s" and not spec.limits:
        problem, fix = "needs an SLO: it counts the requests that meet it", "set serve.slo"
        raise SpecError(key="auto_tuner.objective", value=spec.objective, problem=problem, fix=fix)
    engine.program.ready(spec)


def launch(platform: Platform, engine: Engine, candidate: Candidate, folder: str, *, for_real: bool) -> Launch:
    """Write the files of `candidate` into `folder` and return how to start it. Raises LaunchError."""
    task, serve = platform.task, platform.task.spec.serve
    instances = instances_of(platform, engine, candidate, str(Path(folder, SHARED_FOLDER)))
    directory = serve.directory or folder
    try:
        if for_real:
            router = front_of(platform, engine, candidate, len(instances))
            hosts = task.spec.cluster.hosts if task.spec.on_each_host else ()
            if not hosts and any(each.host or each.further for each in instances):
                text = N_("servers on several hosts need cluster.hostfile and auto_tuner.launcher, or --to {target}")
                raise UsageError(_(text, target=dynamo.TARGET))
            return export.launch(instances, folder, directory, engine.health, hosts, router)
        job = Job(
            engine=engine.where,
            instances=instances,
            loads=tuple(in_flight(load) for load in serve.loads),
            vocab_size=platform.task.spec.model.vocab_size,
            timeout_s=platform.task.spec.control.max_time_per_task or engine.start_seconds,
            repeats=serve.repeats,
            client=serve.client,
            report=serve.report,
            slo=serve.slo,
            asked=(*serve.slo, task.spec.objective),
            highest=serve.highest,
            start=_first_load(platform, engine, candidate),
            patterns=platform.failure_patterns,
            directory=directory,
            versions={engine.name: engine.program.version(platform.task.spec)},
            hosts=task.spec.cluster.hosts[: task.spec.cluster.nodes] if task.spec.on_each_host else (),
            router=front_of(platform, engine, candidate, len(instances))
            if serve.client
            else router_of(platform, engine, candidate),
            prefix_aware=serve.prefix_aware,
        )
        file = Path(folder, SERVE)
        if any(secrets_in_arguments(argv) for argv in (*(each.argv for each in instances), serve.client or ())):
            file.touch(mode=0o600)
        file.write_text(as_text(job), encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from None
    program = (sys.executable, "-m", PROGRAM, folder)
    if not job.hosts:
        return Launch(argv=program, folder=folder)
    on_host = (sys.executable, "-m", HOST_PROGRAM, folder, "{node_rank}", "{node_ports}")
    return Launch(argv=on_host, client=program, folder=folder)


def instances_of(platform: Platform, engine: Engine, candidate: Candidate, shared: str = "") -> tuple[Instance, ...]:
    """Return the servers of a candidate. Those that exchange caches in files use the folder `shared`."""
    values = candidate.as_dict()
    instances = (_instance(platform, engine, values, each) for each in placements(platform.task, values))
    return tuple(each.filled({SHARED: shared}) for each in instances)


def router_of(platform: Platform, engine: Engine, candidate: Candidate) -> Router | None:
    """Return the program in front of the servers if each only prefills or only decodes."""
    values = candidate.as_dict()
    return engine.router(platform.task, values) if engine.router and values.get(PREFILL_DECODE) else None


def front_of(platform: Platform, engine: Engine, candidate: Candidate, count: int) -> Router | None:
    """Return the router in front of `count` instances that gets all requests, None for a balancer.

    In trials, flagcore's own client chooses the instances that do both.
    """
    router = router_of(platform, engine, candidate)
    if router is not None or count == 1 or not platform.task.spec.serve.prefix_aware:
        return router
    return engine.router(platform.task, candidate.as_dict()) if engine.router else Router.own(PREFIX)


def exported(engine: Engine, job: ExportJob, target: str) -> Mapping[str, str]:
    """Return the files of an export to Dynamo or docker compose. Raises UsageError."""
    if target == dynamo.TARGET:
        places = placements(job.platform.task, job.candidate.as_dict())
        return dynamo.export(engine, job, instances_of(job.platform, engine, job.candidate, SHARED), places)
    return compose(engine, job)


def compose(engine: Engine, job: ExportJob) -> Mapping[str, str]:
    """Return the files of docker compose for a candidate. Raises UsageError for an instance on several hosts."""
    instances = instances_of(job.platform, engine, job.candidate, export.SHARED_MOUNT)
    if any(each.further or each.host for each in instances):
        raise UsageError("--to compose starts servers of one host; use --to slurm or dynamo")
    if any(secrets_in_arguments(each.argv) for each in instances):
        raise UsageError("the command contains a secret; pass it in a variable")
    variables = {**job.platform.environment, **job.platform.task.spec.envs}
    common = {name: value for name, value in variables.items() if value not in export.NETWORK_DEVICES}
    return export.compose_files(
        instances,
        job.platform.task.spec.serve.directory,
        common,
        job.comments,
        front_of(job.platform, engine, job.candidate, len(instances)),
    )


def server_groups(platform: Platform, engine: Engine, candidate: Candidate, name: str) -> ServerGroups | None:
    """Return the kinds of servers of a candidate behind a router, see `Replicas`. Raises UsageError."""
    values, on_cores = candidate.as_dict(), Hardware.of(platform.task).on_cores
    instances = instances_of(platform, engine, candidate, SHARED)
    router = front_of(platform, engine, candidate, len(instances))
    if router is None or (router.protocol == PREFIX and (on_cores or values.get(SIZES) is not None)):
        return None
    if any(each.further for each in instances) or on_cores:
        raise UsageError("this target starts servers on devices of one host only")
    if any(SHARED in word for each in instances for word in each.argv):
        raise UsageError(f"{TRANSFER} uses a folder, which servers on several hosts do not share; set another one")
    if any(secrets_in_arguments(each.argv) for each in instances):
        raise UsageError("the command contains a secret; pass it in a variable")
    groups, addresses = list[ServerGroup](), list[tuple[str, str, int]]()
    placed = list(zip(instances, placements(platform.task, values), strict=True))
    for kind, count in Counter(each.kind for each in instances).items():
        instance, place = next(each for each in placed if each[0].kind == kind)
        first = instance.at_head(OWN_ADDRESS, "").at_port(export.FRONT_PORT)
        own = {key: value for key, value in first.environment.items() if key != platform.support.visible_devices}
        ready = (f"http://127.0.0.1:{export.FRONT_PORT}{engine.health}",)
        launch = Launch(argv=first.argv, environment=own, folder="", ready=ready)
        group = kind or "server"
        groups.append(ServerGroup(name=group, launch=launch, devices=place.width, replicas=count))
        hosts = (f"{name}-{group}-{number}.{name}-{group}" for number in range(count))
        addresses += [(kind, host, export.FRONT_PORT) for host in hosts]
    own_router = Router.own(router.protocol, address=("--host", "0.0.0.0", "--port", PORT))
    arguments = own_router.instance(addresses).at_port(export.FRONT_PORT).argv[2:]
    return ServerGroups(groups=tuple(groups), program=export.router_source(), arguments=arguments)


def _first_load(platform: Platform, engine: Engine, candidate: Candidate) -> float:
    """Return the predicted highest load of a candidate, by its rate or, with Little's law, its requests in flight."""
    task, serve = platform.task, platform.task.spec.serve
    if serve.highest is None:
        return 1.0
    own = {axis.knob for axis in engine.axes(task)}
    values = {knob: value for knob, value in candidate.items if knob in own}
    figures = engine.predict(task, engine.columns(task, values), platform.costs).row(0).figures
    rate = figures.get("requests_per_s") or 1.0
    return rate if serve.highest == "request_rate" else max(1.0, rate * (figures.get("e2e_s.mean") or 1.0))


def _instance(platform: Platform, engine: Engine, values: Mapping[str, KnobValue], placement: Placement) -> Instance:
    """Return one server of a candidate with its devices. The user's variables override the engine's."""
    task, variable = platform.task, platform.support.visible_devices
    cores = Hardware.of(task).cores(placement.first, placement.width)
    instance = engine.server(task, placement.values, cores)
    if placement.kind:
        assert engine.of_kind, "the candidate is legal"
        instance = engine.of_kind(task, values, placement.kind, instance)
    environment = {name: value for name, value in instance.environment.items() if name not in task.spec.envs}
    if variable is not None:
        environment[variable] = ",".join(
            _visible_devices(platform, variable)[placement.first : placement.first + placement.width]
        )
    neutral = {axis.knob: axis.neutral for axis in engine.axes(task)}  # the engine chooses these values
    set_values = {knob: value for knob, value in placement.values.items() if value not in (None, neutral.get(knob))}
    argv, other_argvs, hosts = instance.argv, list[tuple[str, ...]](), len(placement.hosts)
    if hosts > 1:
        assert engine.on_host, "the candidate is legal"
        argv, *other_argvs = [(*argv, *engine.on_host(hosts, number)) for number in range(hosts)]
    return replace(
        instance,
        argv=argv,
        environment=environment,
        cores=cores,
        requested=set_values,
        host=placement.hosts[0],
        further=tuple(other_argvs),
        kind=placement.kind,
    )


def _visible_devices(platform: Platform, variable: str) -> list[str]:
    """Return the names of the visible devices in order, by default the indices of a node's devices."""
    spec = platform.task.spec
    names = spec.envs.get(variable) or ("" if spec.on_each_host else os.environ.get(variable))
    if names:
        return [word.strip() for word in names.split(",")]
    return [str(index) for index in range(platform.task.cluster.groups[0].devices_per_node)]
