"""Exports a candidate as files that start it."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import NamedTuple

from flagcore import plugins
from flagcore.api.inputs import LoadedSpec, OpenedSpec
from flagcore.api.outcome import require_startable, start_script
from flagcore.api.runs import Snapshot, columns_of, load_snapshot, snapshot_of
from flagcore.contracts import Exporter, ExportJob, Platform
from flagcore.contracts.exchange import ANY_HOST
from flagcore.domain.files import writable
from flagcore.domain.launch import Launch, ServerGroups
from flagcore.domain.secrets import is_secret, secrets_in_arguments
from flagcore.domain.space import Candidate
from flagcore.domain.spec import HOSTFILE
from flagcore.errors import FlagError, SpecError, UsageError
from flagcore.i18n import N_, _, did_you_mean
from flagcore.launchers.script import ALONE, checked_name, job_name
from flagcore.report.formats import hardware_text
from flagcore.report.text import answers_text, candidate_text
from flagcore.tuner.devices import without_local_devices
from flagcore.tuner.stages.launch import planned_launch, prepared_launch


class Exported(NamedTuple):
    """The files of an export, with notes for the user."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]


def export(
    where: Path | str | LoadedSpec,
    target: str,
    candidate: str = "best",
    *,
    output: Path | str | None = None,
    chip: str | None = None,
    name: str | None = None,
    options: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> Exported:
    """Write files that start a candidate to the folder `output`. The candidate is from a run's folder or from a spec.

    `target`: the engine of the candidate, or a target of an exporter (`flagcore.contracts.Exporter`). `candidate`: its
    name in the form of `explain_candidate`. `options`: see `ExportJob`. `output`: by default, `NAME-TARGET` in
    the working directory. Raises the errors of `flagcore.errors`.
    """
    from flagcore.api.candidate_parser import legal_candidate  # what plans import less
    from flagcore.api.subject import named_columns

    place = Path(where)
    job_id = job_name(place.name if place.is_dir() else place.stem) if name is None else checked_name(name)
    snapshot = load_snapshot(where, chip, without)
    chosen = legal_candidate(snapshot.problem, named_columns(snapshot, candidate)[0])
    folder = Path(output) if output is not None else Path(f"{job_id}-{target}")
    if folder.exists() and (not folder.is_dir() or any(each.name != DRAFT for each in folder.iterdir())):  # or a rest
        raise UsageError(_("{folder} is not empty: delete it or choose another folder", folder=folder))
    require_startable(snapshot.problem, chosen, elsewhere=True)
    work = snapshot.problem.task.spec.work
    if work.missing:
        fix = N_("set it, or let `flag import -- COMMAND` write it: only a prediction does without it")
        raise SpecError(key=f"{work.kind}.{work.missing}", problem="is missing", fix=fix)
    with writable(folder, _("choose another folder with --output")), _whole_folder(folder) as draft:
        files_of = partial(_files, snapshot, chosen, draft, job_id, options or {})
        try:
            files, missing = files_of(target)
        except UsageError as error:
            named = partial(_files, snapshot, chosen, draft, job_id, {"image": "IMAGE", **(options or {})})
            targets = export_targets(work.engine)
            refused = {each: why for each in targets if (why := _refusal(files_of, each)) and _refusal(named, each)}
            accepted = ", ".join(each for each in targets if each not in refused)
            known = _("targets that accept this: {known}", known=accepted or _("none"))
            reasons = [] if accepted else [why for why in [*refused.values()][:1] if why != str(error)]
            raise UsageError("; ".join([str(error), known, *reasons])) from None
        for name, text in files.items():
            (file := draft / name).parent.mkdir(exist_ok=True)
            file.write_text(text, "utf-8", errors="surrogateescape")
            file.chmod(0o755 if text.startswith("#!") else 0o644)  # a script can be executed
    text = N_("the job trains on generated data until you replace the sample arguments; add {missing}")
    notes = (_(text, missing=missing),) if missing else ()
    return Exported(files=tuple(sorted(each for each in folder.rglob("*") if each.is_file())), notes=notes)


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder, which becomes `folder` at the end. It is deleted if an exception ends the context.

    Its path in the text files that were written to it is replaced by that of `folder`. Only the owner can read files
    with secrets. It is inside `folder` if that cannot be replaced. Raises OSError.
    """
    target = folder.resolve()
    is_fixed = target == Path.cwd() or target.is_mount() or not os.access(target.parent, os.W_OK)
    parent = next(each for each in target.parents if each.exists())
    draft = target / DRAFT if target.exists() and is_fixed else parent / f".{target.name}{DRAFT}"
    rmtree(draft, ignore_errors=True)  # of an export that was killed
    try:
        draft.mkdir(0o700)
        yield draft
        for file in filter(Path.is_file, draft.rglob("*")):
            if str(draft) in (text := file.read_text("utf-8", errors="surrogateescape")):
                file.write_text(text.replace(str(draft), str(target)), "utf-8", errors="surrogateescape")
            if is_secret("", text):
                file.chmod(file.stat().st_mode & 0o700)
        draft.chmod(0o755)
        for each in draft.iterdir() if draft.parent == target else ():
            each.rename(target / each.name)
        if draft.parent != target:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft.rename(target)
    finally:
        rmtree(draft, ignore_errors=True)


DRAFT = ".part"
"""The end of the name of an export's folder while it is written."""


def _files(
    snapshot: Snapshot, candidate: Candidate, folder: Path, name: str, options: Mapping[str, str], target: str
) -> tuple[Mapping[str, str], str]:
    """Return the content of each file for a target, and what is missing. Raises UsageError if it is refused."""
    exporters = _exporters(snapshot.task.spec.work.engine, target)
    if target not in exporters:
        extras = (plugins.missing_extra(group, target) for group in (plugins.LAUNCHERS, plugins.IMPORTERS))
        fix = next(filter(None, extras), "") or did_you_mean(target, exporters)
        text = _("--to {target} is not a target of this job", target=target)
        raise UsageError("; ".join(filter(None, [text, fix])) if target else _("--to is missing"))
    exporter = exporters[target]
    job = _job(snapshot, candidate, exporter, folder, name, options)
    most = getattr(exporter, "most_vendors", 0)
    if job.unequal_nodes and len({group.chip.vendor for group in snapshot.task.cluster.groups}) > most:
        text = N_("--to {target} starts all nodes with one command, but this cluster has several kinds of chips")
        text = N_("--to {target} starts no collective library that connects chips of several vendors") if most else text
        raise UsageError(_(text, target=target))
    read = ("restarts", *("resource", "queue") * (job.nodes > 1)) if exporter is None else exporter.targets[target]
    if unread := [each for each in options if each not in read]:
        raise UsageError(_("--to {target} has no use for --{option}", target=target, option=unread[0]))
    files = {f"{name}.sh": start_script(job)} if exporter is None else exporter.export(job, target)
    return files, job.launch.missing if job.launch.sample else ""


def first_target(opened: OpenedSpec, candidate: Candidate) -> str:
    """Return the first target that accepts a candidate without options, the engine first. Empty if none does."""
    snapshot, work = snapshot_of(opened), opened.problem.task.spec.work
    with TemporaryDirectory() as folder, suppress(FlagError):
        require_startable(snapshot.problem, candidate, elsewhere=True)
        if work.has_steps and work.command is None:  # raises if there is no program, for any target
            planned_launch(snapshot.problem.platform, candidate, folder, for_real=True)
        files_of = partial(_files, snapshot, candidate, Path(folder), "job", {})
        if not _refusal(files_of, work.engine):
            return work.engine
        return next((each for each in export_targets(work.engine) if not _refusal(files_of, each)), "")
    return ""


def _refusal(files_of: Callable[[str], object], target: str) -> str:
    """Return why a target does not accept a candidate, or an empty text if it does."""
    try:
        files_of(target)
    except (FlagError, OSError) as error:
        return str(error)
    return ""


def export_targets(engine: str | None = None) -> tuple[str, ...]:
    """Return the names of all export targets, or of those for candidates of one engine."""
    return tuple(_exporters(engine))


def _exporters(engine: str | None, wanted: str = "") -> dict[str, Exporter | None]:
    """Return the exporters that can be loaded by target, up to `wanted`. None is that of an engine: a start script."""
    names = (engine,) if engine else plugins.names(plugins.ENGINES)
    loads: list[Callable[[], object]] = [partial(plugins.find_engine, name) for name in names]
    loads += [partial(plugins.launcher, name) for name in plugins.names(plugins.LAUNCHERS)]
    loads += [partial(plugins.importer, name) for name in plugins.names(plugins.IMPORTERS)]
    result: dict[str, Exporter | None] = dict.fromkeys(names)
    for load in loads:
        with suppress(FlagError):
            if wanted not in result and isinstance(found := load(), Exporter):
                result |= dict.fromkeys(found.targets, found)
    return result


def _job(
    snapshot: Snapshot,
    candidate: Candidate,
    exporter: Exporter | None,
    folder: Path,
    name: str,
    options: Mapping[str, str],
) -> ExportJob:
    """Return the job of a candidate, or of one instance of its server if the exporter starts all instances."""
    engine: object = snapshot.problem.engine
    platform, copies = snapshot.problem.platform, int(options.get("replicas", 1))
    platform = platform if exporter is None or exporter is engine else without_local_devices(platform)
    platform = _elsewhere(platform, exporter, engine)
    image = snapshot.problem.engine.plans.image(platform.task, platform.support)
    make = partial(ExportJob, name=name, comments=_comments(snapshot, candidate), platform=platform)
    make = partial(make, candidate=candidate, options=options, image=image)
    per_server = exporter is not None and exporter.per_server
    servers = snapshot.problem.engine.servers(platform, candidate, name) if per_server else (candidate, 1)
    if (restarts := options.get("restarts")) and not snapshot.task.spec.work.has_steps:
        raise UsageError(_("--restarts is for training: what starts servers decides about them"))
    if copies > 1 and (isinstance(servers, ServerGroups) or snapshot.task.spec.work.has_steps):
        raise UsageError(_("--replicas is for equal servers, each on one host"))
    if isinstance(servers, ServerGroups):
        groups = tuple(replace(each, launch=prepared_launch(platform, each.launch)) for each in servers.groups)
        return make(launch=groups[0].launch, devices=groups[0].devices, servers=replace(servers, groups=groups))
    single_server, replicas = servers
    launch = Launch(argv=(), folder="") if exporter is engine else _launch(platform, single_server, folder)
    per_node = max(group.devices_per_node for group in snapshot.task.cluster.groups)
    used = snapshot.problem.engine.device_counts(snapshot.task, columns_of(snapshot, single_server))
    job = make(launch=launch, devices=min(per_node, int(used[0])), replicas=replicas * copies)
    in_place = {"PET_MAX_RESTARTS": restarts, **ALONE} if restarts and job.nodes == 1 else {}
    return replace(job, launch=replace(launch, environment={**launch.environment, **in_place}))


def _elsewhere(platform: Platform, exporter: Exporter | None, engine: object) -> Platform:
    """Return the platform for other machines: programs of servers are found there, and hosts are those of the target.

    A start script of servers has the hosts of the spec, if it names them.
    """
    spec, work = platform.task.spec, platform.task.spec.work
    cluster, launcher = spec.cluster, spec.launcher
    if work.has_steps and (work.command is None or any(HOSTFILE in word for word in work.command)):
        return platform
    in_image = exporter is engine or (exporter is not None and exporter.per_server)
    work = work.on_other_machines("image" if in_image else "host")
    if cluster.nodes > 1 and not (exporter is None and spec.on_each_host):
        cluster = replace(cluster, hosts=tuple(ANY_HOST.format(number) for number in range(cluster.nodes)))
        launcher = "hosts"  # any launcher on hosts that the target determines
    spec = replace(spec, work=work, cluster=cluster, launcher=launcher)
    return replace(platform, task=replace(platform.task, spec=spec))


def _launch(platform: Platform, candidate: Candidate, folder: Path) -> Launch:
    launch = prepared_launch(platform, planned_launch(platform, candidate, str(folder), for_real=True))
    if secrets_in_arguments(launch.argv):
        raise UsageError(_("the command contains a secret; pass it in a variable"))
    return replace(launch, directory=None) if launch.directory == str(folder) else launch


def _comments(snapshot: Snapshot, candidate: Candidate) -> tuple[str, ...]:
    """Return where a candidate comes from, and a line for each knob that is not at its default."""
    task, knobs = snapshot.task, snapshot.problem.knobs
    hardware = hardware_text(task.cluster.devices, task.cluster.chips)
    work = task.spec.work
    release = f" with {work.engine} {work.engine_version}" if work.engine_version else ""
    first = f"{candidate_text(candidate, knobs)} on {hardware}{release}, from {snapshot.where.resolve().name}"
    own = [(knobs[name], value) for name, value in candidate.items if name in knobs and value is not None]
    state = snapshot.search_state
    answers = answers_text(state.reported_trial(state.by_candidate.get(candidate)), state.baseline)
    variables = ", ".join(snapshot.problem.platform.environment)
    return (
        first,
        *filter(None, [answers]),
        *(f"  {knob.name} = {value}: {knob.help}" for knob, value in own if value != knob.neutral),
        *([f"  {variables}: what the plugins of the chips set, see docs/vendors.md"] if variables else []),
    )
