"""Writes the files at the end of a run: the result, and the best configuration as a spec, a launch and a script."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flagcore import plugins
from flagcore.contracts import ExportJob, Problem
from flagcore.contracts.exchange import comments
from flagcore.domain.files import writable, write
from flagcore.domain.launch import Launch
from flagcore.domain.plan import Plan, cost_figures
from flagcore.domain.records import COSTS
from flagcore.domain.secrets import is_secret, redact_data, redact_text, secrets_in_arguments, secrets_in_data
from flagcore.domain.space import Candidate
from flagcore.domain.spec import is_rate
from flagcore.domain.trial import ESTIMATE, PROBE, RUN
from flagcore.errors import NoDevice, UsageError
from flagcore.i18n import N_, _, printable
from flagcore.launchers.script import job_name, start_lines
from flagcore.report.formats import Notebook, as_yaml, hardware_text
from flagcore.report.result import Result
from flagcore.report.run import RunData, json_file
from flagcore.report.run_text import result_text
from flagcore.report.text import best_text, candidate_text
from flagcore.tuner.devices import with_selected_devices
from flagcore.tuner.problem import no_launch_reason
from flagcore.tuner.stages.launch import planned_launch, prepared_launch

if TYPE_CHECKING:
    from flagcore.tuner.loop import TuneResult


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome(Notebook):
    """The result of `flag tune`: the plan, its folder, and `data`, which is the content of `result.json`.

    - `shown`: the result without secrets, for output to the user.
    - `run_best`: whether the spec requests to start the best at the end.
    - `can_start`: whether the best can be started without changes.
    - `reported`: whether the report page was written.
    """

    plan: Plan
    run_dir: Path
    data: Mapping[str, Any]
    shown: RunData
    run_best: bool
    can_start: bool = True
    reported: bool = False

    def __str__(self) -> str:
        return result_text(self.shown)

    def __repr__(self) -> str:
        return f"<Outcome in {self.run_dir}: {best_text(self.plan.best, self.plan.speedup, self.plan.knobs)}>"


def save(ending: TuneResult, run_dir: Path, spec: Mapping[str, Any]) -> Outcome:
    """Write the result of a search to `run_dir`, and the spec, launch and script of the best configuration, if any."""
    plan, problem = ending.plan, ending.problem
    cannot, precision_reason = "", problem.platform.precision_reason
    data = redact_data(Result.write(plan, str(run_dir)), problem.task.spec.secrets)
    if precision_reason:
        work = problem.task.spec.work
        data["precision"] = {"value": work.precision, "reason": precision_reason}
        spec = {**spec, work.kind: {**spec[work.kind], "precision": work.precision}}
    # If a finished run is started again, its trials have only a plain text of why it stopped, not the translatable one.
    earlier = json_file(run_dir, "result.json")
    if earlier.get("stopped_because") == data["stopped_because"] and "stopped_message" in earlier:
        data["stopped_message"] = earlier["stopped_message"]
    for each in filter(None, (data["baseline"], data["best"])):
        median_s = plan.runs_of(Candidate.of(each["candidate"])).median_s
        each["cost"] = _cost(problem, each, median_s if is_rate(plan.objective) else None)
    run_best = problem.task.spec.control.run_best and plan.fidelity == RUN
    context: dict[str, Any] = {"knobs": plan.knobs, "labels": problem.engine.plans.labels}
    shown = RunData.from_json(data, run_dir, folder_name=str(run_dir), **context)
    outcome = Outcome(plan=plan, run_dir=run_dir, data=data, shown=shown, run_best=run_best)
    with writable(run_dir):
        write(run_dir / "result.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        write(run_dir / "report.txt", printable(str(outcome)) + "\n")
        if plan.best:
            folder = run_dir.resolve() / "best"
            folder.mkdir(0o700, exist_ok=True)  # its files may contain secrets
            cannot = _save_launch(plan, problem, run_dir)
            tuner = {key: value for key, value in (spec.get("auto_tuner") or {}).items() if key != "baseline"}
            best_spec = {**spec, "auto_tuner": {**tuner, "space": plan.best.candidate.as_dict()}}
            write(run_dir / "best.yaml", as_yaml(best_spec) + "\n", private=bool(secrets_in_data(spec)))
    return replace(outcome, can_start=not cannot)


def _cost(problem: Problem, trial: Mapping[str, Any], median_s: float | None) -> dict[str, float]:
    """Return the cost of a trial in the format of result.json: as measured, or else as predicted.

    `median_s`: the median step time over several runs of its candidate, or None to use the time of the trial.
    """
    predicted, measured = trial["predicted"], trial["measured"]
    if not measured:
        return {name: predicted[name] for name in COSTS if name in predicted}
    rate = measured.get("figures", {}).get("output_tokens_per_s_per_device", measured["tokens_per_second_per_device"])
    step_s = measured["step_time_s"]["median"]
    seconds = median_s or step_s
    return cost_figures(problem.platform.task, seconds, rate * step_s / seconds)


def _save_launch(plan: Plan, problem: Problem, run_dir: Path) -> str:
    """Write `best.sh` and `best/launch.json`. Return why the best cannot be started unchanged, or an empty string.

    There is no `best.sh` if the best cannot be started at all. `launch.json` then has only the reason.
    """
    assert plan.best is not None
    best, folder, file = plan.best.candidate, run_dir.resolve() / "best", run_dir / "best.sh"
    try:
        require_startable(problem, best)
        planned = planned_launch(problem.platform, best, str(folder), for_real=True)
        launch = prepared_launch(with_selected_devices(problem.platform), replace(planned, script=""))
        text = _start_script(plan, launch, problem, run_dir)
    except UsageError as error:
        file.unlink(missing_ok=True)
        write(folder / "launch.json", json.dumps({"cannot": str(error)}))
        return str(error)
    place = Path(launch.directory or launch.folder)
    inside = place.relative_to(run_dir.resolve()) if place.is_relative_to(run_dir.resolve()) else place
    saved = {**redact_data(asdict(launch)), "folder": "best", "directory": str(inside)}
    write(folder / "launch.json", json.dumps({**saved, **_places(problem)}, indent=1))
    write(file, text)
    file.chmod(0o755)
    return launch.missing


def _places(problem: Problem) -> dict[str, Any]:
    """Return where a command of the user starts: launcher, hosts and users. There are no hosts if it starts here."""
    spec, cluster = problem.task.spec, problem.task.spec.cluster
    same = spec.work.command and spec.on_each_host and not problem.platform.setups and cluster.nodes > 1
    hosts = cluster.hosts[: cluster.nodes] if same and len(cluster.hosts) >= cluster.nodes else ()
    return {"launcher": spec.launcher, "hosts": hosts, "users": dict(cluster.users)}


def _start_script(plan: Plan, launch: Launch, problem: Problem, run_dir: Path) -> str:
    """Return a shell script that starts a launch. Secrets of the launch that this shell lacks are written to SECRETS.

    If arguments of the launch are missing, the script trains on generated data, or starts the servers of a host.
    Raises UsageError if the nodes need different scripts.
    """
    assert plan.best is not None
    groups = problem.platform.task.cluster.groups
    job = ExportJob(
        name=job_name(run_dir.name),
        comments=(heading(plan),),
        platform=problem.platform,
        candidate=plan.best.candidate,
        launch=launch,
        devices=max(group.devices_per_node for group in groups),
    )
    if job.unequal_nodes:
        text = N_("each kind of chips needs its own script; `flag export {run} --to slurm` writes or says what does")
        raise UsageError(_(text, run=run_dir))
    if launch.missing:
        return start_script(job)
    launch, names = _with_secret_variables(launch)
    secrets = [f". {SECRETS_HERE} || exit 1"] if _save_secrets(launch, run_dir.resolve() / "best" / SECRETS) else []
    launch = replace(launch, directory=launch.directory or launch.folder)
    job = replace(job, comments=(*job.comments, *_script_comments(launch)), launch=launch)
    names = {**names, f"{run_dir.resolve()}/": "{here}/"}
    lines = [*secrets, *start_lines(job, several="--nnodes={nnodes}" in launch.argv, names=names)]
    here = [HERE] if "${here}" in "".join(lines) else []
    return "\n".join(["#!/bin/sh", *comments(job), *here, *lines]) + "\n"


def start_script(job: ExportJob) -> str:
    """Return a script that starts a job: that of Slurm on several nodes, which also starts the job on each of them."""
    if job.nodes == 1:
        return "\n".join(["#!/bin/bash", *comments(job), *start_lines(job)]) + "\n"
    slurm: Any = plugins.launcher("slurm")
    return str(next(iter(slurm.export(job, slurm.name).values())))


def _save_secrets(launch: Launch, file: Path) -> bool:
    """Write the secrets of a launch that this shell lacks to a file. Return whether there are any."""
    given = {name: value for name, value in launch.environment.items() if value and is_secret(name, value)}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in given.items() if os.environ.get(name) != value]
    if lines:
        text = "\n".join(["# Secrets of the best configuration. Do not share this file.", *lines]) + "\n"
        write(file, text, private=True)
    return bool(lines)


def _script_comments(launch: Launch) -> Iterator[str]:
    """Yield what a start script says about the user's script, and the commands of that which it leaves out."""
    if launch.own_script or launch.leaves_out is not None:
        yield OWN_SCRIPT if launch.own_script else FROZEN
    if launch.leaves_out:
        yield "It also runs:"
        yield from (f"  {' '.join(redact_text(each).splitlines())}" for each in launch.leaves_out)


def _with_secret_variables(launch: Launch) -> tuple[Launch, dict[str, str]]:
    """Return a launch with a variable for each secret in its command, and the names of these variables by secret."""
    environment = dict(launch.environment)
    name_by_secret = {
        value: name for name, value in {**os.environ, **environment}.items() if is_secret(name, value) and value
    }
    names = dict[str, str]()
    for number, value in enumerate(secrets_in_arguments(launch.argv), start=1):
        names[value] = name_by_secret.get(value, f"FLAGCORE_{number}_SECRET")
        environment[names[value]] = value
    return replace(launch, environment=environment), names


def require_startable(problem: Problem, best: Candidate, *, elsewhere: bool = False) -> None:
    """Raise UsageError if the best of a plan cannot be started without changes on any machine.

    With `elsewhere`, another program starts it, so this host and the launcher of the spec do not matter.
    """
    platform, values, engine = problem.platform, best.as_dict(), problem.engine
    for knob in platform.task.knobs:
        if why := no_launch_reason(platform.task, knob, values.get(knob.name, knob.neutral)):
            raise UsageError(f"{knob.name} = {values[knob.name]}: {why}")
    work = platform.task.spec.work
    if work.has_steps and not work.starts_itself:
        return  # this is the engine's own program, which the user completes
    with suppress(NoDevice):  # raised if the engine is not installed on this machine
        if not elsewhere:
            engine.ready(platform.task.spec)
    if work.command is None and platform.support.device_type is None:
        names = {"engine": engine.name, "chip": platform.task.cluster.chips}
        raise UsageError(_("no installed plugin supports {engine} on {chip}", **names))


OWN_SCRIPT = "Runs your script. The best values replace the arguments of the program that it starts."
FROZEN = "The command of your script. Computed values, such as dates, ports and ranks, are those of the tuning."
SECRETS = "secrets.sh"
"""The name of a file next to `launch.json` that only its owner can read. It contains the secrets of best.sh that this
shell does not have."""
SECRETS_HERE = f'"${{here}}/"best/{SECRETS}'
HERE = "case $0 in /*) here=${0%/*} ;; */*) here=$PWD/${0%/*} ;; *) here=$PWD ;; esac"
"""The line of best.sh that finds the run, which may be moved."""


def heading(plan: Plan) -> str:
    """Return a line that describes the best configuration."""
    assert plan.best is not None
    commands = {
        RUN: f"{len(plan.trials)} trials",
        PROBE: f"{len(plan.trials)} candidates probed on one device, none of which ran,",
        ESTIMATE: f"{plan.counts.candidates} candidates as predicted, none of which ran,",
    }[plan.fidelity]
    hardware = hardware_text(plan.devices, plan.chip)
    word = "Recommended" if plan.fidelity == ESTIMATE else "Best"
    return f"{word} of {commands} on {hardware}: {candidate_text(plan.best.candidate, plan.knobs)}"
