"""What a tune leaves behind: the result, and the best configuration in every form in which it can be used."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from flagcore.api.common.warnings import warn
from flagcore.api.tuning.script import MEETING_PLACE, SECRETS, Hidden, directory, excuse, script, secrets_script
from flagcore.api.tuning.serve_best import serve
from flagcore.contracts import Workload
from flagcore.domain.candidate import Candidate
from flagcore.domain.launch import Launch
from flagcore.domain.plan import Plan
from flagcore.domain.secrets import redact_data, secrets_in_data, secrets_in_environment
from flagcore.domain.trial import RUN
from flagcore.errors import NoDevice, RunError, SpecError, UsageError
from flagcore.loop import TuneResult
from flagcore.problem import Problem, no_launch_reason
from flagcore.report.formats import Notebook, as_yaml
from flagcore.report.page.text import result_text
from flagcore.report.result import result
from flagcore.report.text import candidate_text
from flagcore.stages.launch import planned_launch
from flagcore.store.directory import writable, write


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome(Notebook):
    """What a tune found: the plan, the folder that holds it, and the same as plain data (`result.json`) and as text.

    `run_best` says that the spec asks to start the winner at the end, `can_start` that the winner can be started as it
    stands, `reported` that the run's page was written.
    """

    plan: Plan
    run_dir: Path
    data: Mapping[str, Any]
    run_best: bool
    can_start: bool = True
    reported: bool = False

    def __str__(self) -> str:
        return result_text(self.data, self.plan.knobs)

    def __repr__(self) -> str:
        best = self.plan.best
        message = f"best trial {best.number}: {candidate_text(best.candidate, self.plan.knobs)}" if best else "no best"
        gain = "" if self.plan.gain is None else f", gain {self.plan.gain:+.1%}"
        return f"<Outcome in {self.run_dir}: {message}{gain}>"


def save(ending: TuneResult, workload: Workload, run_dir: Path, spec: Mapping[str, Any]) -> Outcome:
    """Write the result and, where there is one, the best configuration in every form in which it can be used."""
    plan, problem = ending.plan, ending.problem
    cannot = _cannot_start(problem, workload, plan.best.candidate) if plan.best else "there is no best"
    data = redact_data(result(plan, str(run_dir)), secrets_in_environment(os.environ))
    private = bool(secrets_in_data(spec))
    with writable(run_dir):
        write(run_dir / "result.json", json.dumps(data, indent=1, ensure_ascii=False) + "\n")
        write(run_dir / "report.txt", result_text(data, plan.knobs) + "\n")
        if plan.best:
            folder = run_dir.resolve() / "best"
            folder.mkdir(exist_ok=True)
            if cannot:
                (folder / "launch.json").unlink(missing_ok=True)
                write(run_dir / "best.sh", excuse(plan, cannot))
            else:
                best = plan.best.candidate
                planned = planned_launch(problem.platform, workload, best, str(folder), for_real=True)
                launch = problem.platform.prepared(planned)
                hidden = Hidden.of(launch)
                write(folder / "launch.json", _as_json(launch, hidden), private=bool(hidden))
                if hidden.kept:
                    write(folder / SECRETS, secrets_script(hidden), private=True)
                write(run_dir / "best.sh", script(plan, launch, hidden, folder))
            (run_dir / "best.sh").chmod(0o755)
            write(run_dir / "best.yaml", _best_spec(plan.best.candidate, spec), private=private)
    wanted = problem.platform.task.spec.control.run_best and plan.fidelity == RUN
    return Outcome(plan=plan, run_dir=run_dir, data=data, run_best=wanted, can_start=not cannot)


def run_best(
    run_dir: Path | str, *, stdout: int | None = None, on_ready: Callable[[str], object] | None = None
) -> NoReturn:
    """Become the best configuration of a run, for real: this process is replaced by it.

    Servers are started instead, and stopped when this process ends. `on_ready` is called with their URL once they
    answer. `stdout` is a file descriptor for output. Raises RunError if the run has no best configuration,
    UsageError if it cannot be started.
    """
    file = Path(run_dir) / "best" / "launch.json"
    try:
        launch = json.loads(file.read_text(encoding="utf-8"))
        argv, environment, folder = list(launch["argv"]), dict(launch["environment"]), str(launch["directory"])
        ready = tuple(map(str, launch.get("ready", ())))
        lacking = [str(name) for name in launch.get("needs", ()) if not os.environ.get(str(name))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({type(error).__name__})"
        raise RunError(f"{file} {reason}; `flag tune` writes it when it has measured a best configuration") from None
    if lacking:
        raise UsageError(f"{', '.join(lacking)} must be set: secrets of a shell are not saved")
    sys.stdout.flush()
    if ready:
        server = Launch(argv=tuple(map(str, argv)), environment=environment, folder=folder, ready=ready)
        sys.exit(serve(server, 1 if stdout is None else stdout, on_ready or str))
    if stdout is not None:
        os.dup2(stdout, 1)
    goes = f"output comes here, files go to {launch.get('folder', folder)}"
    try:
        os.chdir(folder)
        program, variables = argv[0], {**MEETING_PLACE, **os.environ, **environment}
        warn([f"training the best of {run_dir}, the command of best.sh there; {goes}"])
        os.execvpe(program, argv, variables)
    except (OSError, ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{' '.join(map(str, argv[:1]))} cannot be started in {folder}: {error}") from None


def _cannot_start(problem: Problem, workload: Workload, best: Candidate) -> str | None:
    """Return why the best of a plan cannot be started as it stands on any machine, None if it can."""
    platform, values = problem.platform, best.as_dict()
    for knob in platform.task.knobs:
        if why := no_launch_reason(platform.task, knob, values.get(knob.name, knob.neutral)):
            return f"{knob.name} = {values[knob.name]}: {why}"
    try:
        workload.ready(platform.task.spec)
    except SpecError as error:
        return str(error)
    except NoDevice:
        pass  # the engine is not installed on this machine
    if platform.task.spec.work.command is None and platform.support.device_type is None:
        return f"no installed plugin supports {workload.name} on {platform.task.cluster.chips}"
    return None


def _as_json(launch: Launch, hidden: Hidden) -> str:
    """Return a launch as JSON; secrets that this shell has are only named."""
    given = {name: value for name, value in launch.environment.items() if name not in hidden.inherited}
    needs = [name for name in hidden.inherited if name in launch.environment]
    return json.dumps(
        {**asdict(launch), "environment": given, "needs": needs, "directory": directory(launch)}, indent=1
    )


def _best_spec(candidate: Candidate, spec: Mapping[str, Any]) -> str:
    """Return the user's spec with every knob fixed to the best value."""
    tuner = {key: value for key, value in (spec.get("auto_tuner") or {}).items() if key != "baseline"}
    return as_yaml({**spec, "auto_tuner": {**tuner, "space": candidate.as_dict()}}) + "\n"
