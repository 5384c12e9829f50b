"""Starts the best configuration of a run. Servers run until they, or this process, end."""

import json
import math
import os
import re
import shlex
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import psutil

from flagcore import plugins
from flagcore.api.commands.importing import spec_of_model
from flagcore.api.commands.tune import tune
from flagcore.api.inputs import check_chips, loaded_plugins, read_spec
from flagcore.api.notes import LOG, warn
from flagcore.api.outcome import SECRETS, SECRETS_HERE
from flagcore.api.runs import no_best_error, read_run
from flagcore.domain.files import read_regular, write
from flagcore.domain.launch import PORT_VARIABLE, Launch
from flagcore.domain.trial import ESTIMATE
from flagcore.errors import NoDevice, RunError, SpecError, UsageError
from flagcore.i18n import N_, _
from flagcore.launchers.local import start_for_users
from flagcore.tuner.run_folder import IDENTITY

PERIOD_SECONDS = 0.5
ANSWER_SECONDS = 2.0
KEYS = ("ready", "missing", "folder", "directory")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def run_best(
    run_dir: Path | str,
    *,
    stdout: int | None = None,
    on_ready: Callable[[str], object] | None = None,
    port: int | None = None,
    dry_run: bool = False,
    restarts: int = 0,
    spares: Sequence[str] = (),
    stall: float | None = None,
) -> NoReturn:
    """Start the best configuration of a run, or with `dry_run` print the script that starts it.

    Training replaces this process, or runs on the hosts of the run, and with `restarts` here, as `Launcher.run_job`
    does, which describes `stall`. Servers are child processes, which stop when this process ends. `on_ready` is called
    with their URL once they respond. `port`: that of the servers, in place of their default. `stdout` is a file
    descriptor for their output. Raises `no_best_error` if the run has no best configuration, UsageError if it cannot be
    started, or after its command is printed, because the user has to complete it, and HostLost if a host is lost.
    """
    launch = _saved_launch(run_dir)
    ready, missing, folder = launch["ready"], str(launch["missing"]), launch["directory"]
    argv = ["bash", str(Path(run_dir).resolve() / "best.sh")]
    for path in (argv[1], *(() if missing else (folder,))):
        if not os.path.exists(path):
            raise UsageError(_("{path} is missing; restore it, or tune again with --new", path=path))
    if port is not None and not ready:
        raise UsageError(_("--port: the best configuration of {run} is no server that starts here", run=run_dir))
    if (restarts or spares or stall) and ready:
        raise UsageError(_("--restarts, --spares, --stall: the best configuration of {run} is a server", run=run_dir))
    if missing and restarts and not dry_run:
        text = N_("--restarts: the best configuration of {run} has no train.command to start again; tune with one")
        raise UsageError(_(text, run=run_dir))
    if dry_run or missing:
        (sys.stderr if stdout == 2 else sys.stdout).write(Path(argv[1]).read_text(encoding="utf-8"))
    sys.stdout.flush()
    if dry_run:
        sys.exit()
    if missing:  # it would train on generated data
        text = N_("the command of the best configuration of {run} is incomplete; add {missing}")
        raise UsageError(_(text, run=run_dir, missing=missing))
    if ready:
        server = _on_port(Launch(argv=tuple(argv), folder=folder, ready=tuple(map(str, ready))), port)
        sys.exit(_serve(server, 1 if stdout is None else stdout, on_ready or str))
    if stdout is not None:
        os.dup2(stdout, 1)
    if launch["hosts"] or restarts or spares or stall:
        sys.exit(_run_job(Path(argv[1]), launch, restarts, spares, stall))
    warn([_("training the best configuration of {run}; files go to {folder}", run=run_dir, folder=launch["folder"])])
    os.execvp(argv[0], argv)


def plan_server(model: str, run_dir: Path, *, chip: str | None, engine: str | None = None) -> None:
    """Write a run with the fastest predicted configuration of a server for a model, without measuring.

    `chip`, `engine`: None means that of this machine, and the first that can start here. Raises NoDevice if none can,
    UsageError for a spec or a run, and SpecError for an unknown chip.
    """
    if Path(model).suffix in (".yaml", ".yml") or os.path.exists(Path(model, IDENTITY)):
        text = N_("{model} is a spec or a run; --chip and --engine are for weights: start a run without them")
        raise UsageError(_(text, model=model))
    check_chips({"chip": chip} if chip else None)
    with loaded_plugins(()) as loaded:
        found = [each for device in loaded.devices() if (each := loaded.find_chip(device.chip))]
    if chip and not any(each.has_name(chip) for each in found):
        raise NoDevice(_("no {chip} on this machine; use --chip auto", chip=chip))
    serves = [kind.kind for kind in plugins.usable(plugins.kinds(), LOG.debug).values() if kind.plans_with]
    servers = [each for each in plugins.engines() if plugins.kind_of(each) in serves]
    if engine and engine not in servers:
        text = N_("--engine {name} serves no model: use one of {known}")
        raise UsageError(_(text, name=engine, known=", ".join(servers)))
    for name in [engine] if engine else servers:
        spec = spec_of_model(model, engine=name, chip=chip)
        try:
            plugins.find_engine(name).ready(read_spec(spec))
            tune(spec, run_dir=run_dir, fidelity=ESTIMATE)
            return
        except (NoDevice, SpecError) as error:
            if engine:
                text = N_("{engine} cannot serve {model}: {reason}")
                raise NoDevice(_(text, engine=name, model=model, reason=error)) from None
    text = N_("none of {engines} can serve {model} here; --engine NAME shows what one of them lacks")
    raise NoDevice(_(text, engines=", ".join(servers), model=model))


def _saved_launch(run_dir: Path | str) -> dict[str, Any]:
    """Return `launch.json` of the best configuration. Raises RunError, or the error of `no_best_error`."""
    file = Path(run_dir) / "best" / "launch.json"
    try:
        launch = json.loads(read_regular(file, folder=Path(run_dir)))
        if "cannot" in launch:
            raise UsageError(_("the best of {run} cannot be started: {reason}", run=run_dir, reason=launch["cannot"]))
        here = {name: os.path.join(os.path.abspath(run_dir), launch[name]) for name in ("folder", "directory")}
        return {"hosts": (), "users": {}, **launch, **{name: launch[name] for name in KEYS}, **here}
    except (OSError, ValueError, KeyError, TypeError) as error:
        run_files = (IDENTITY, "result.json", "best/launch.json")
        if not any(os.path.isfile(os.path.join(run_dir, name)) for name in run_files):
            problem = _("{folder} is not a run; `flag tune` creates one, in `--run-dir`", folder=run_dir)
            raise RunError(problem) from None
        is_missing = isinstance(error, FileNotFoundError)
        if is_missing and ((run := read_run(Path(run_dir))).best is None or run.stopped_because is None):
            raise no_best_error(run) from None
        reason = _("missing") if is_missing else type(error).__name__
        text = N_("{file} cannot be read ({reason}); run `flag tune` to write it with the best configuration")
        raise RunError(_(text, file=file, reason=reason)) from None


def _run_job(script: Path, launch: Mapping[str, Any], *how: Any) -> int:
    """Run a script on the hosts of a run, or under an agent here. `how`: the last arguments of `Launcher.run_job`."""
    hosts, folder = launch["hosts"], script.parent / "best" / "hosts"
    text, secrets = script.read_text(encoding="utf-8"), folder.parent / SECRETS
    folder.mkdir(exist_ok=True)
    if secrets.exists():  # in this folder, they are sent to the hosts
        write(folder / SECRETS, secrets.read_text(encoding="utf-8"), private=True)
        text = text.replace(SECRETS_HERE, shlex.quote(str(folder / SECRETS)))
    job = Launch(argv=("sh", "-c", text, str(script)), folder=str(folder), hosts=hosts or ("localhost",))
    job = replace(job, directory=launch["directory"], timeout_seconds=math.inf, disk_limit_bytes=1 << 62)
    return plugins.launcher(launch["launcher"] if hosts else "here").run_job(job, launch["users"], *how)


def _on_port(launch: Launch, port: int | None) -> Launch:
    """Return the launch of servers of which the first has `port`, by default its own, and the others the next ones."""
    first = urlsplit(launch.ready[0]).port or 80
    shift = 0 if port is None else port - first
    urls = (re.sub(r":(\d+)", lambda match: f":{int(match[1]) + shift}", url, count=1) for url in launch.ready)
    return replace(launch, ready=tuple(urls), environment={PORT_VARIABLE: str(first + shift)})


def _serve(launch: Launch, stdout: int, on_ready: Callable[[str], object]) -> int:
    """Run servers until they end. Return their exit status, or 128 plus the number of the signal that ended them.

    `on_ready` is called with their URL once all of `launch.ready` respond with status 200. Raises UsageError if the
    servers cannot be started, or if one of their ports is in use.
    """
    if used_urls := [url for url in launch.ready if _listens(url)]:
        port = urlsplit(used_urls[0]).port
        text = N_("port {port} is in use by {program}; stop it, or choose another port with `flag run --port`")
        raise UsageError(_(text, port=port, program=_holder(port)))
    servers, is_ready = start_for_users(launch, stdout, 2), False
    try:
        while (ended := servers.wait(PERIOD_SECONDS)) is None:
            if not is_ready and _responds(launch.ready):
                is_ready = True
                on_ready("{0.scheme}://{0.netloc}".format(urlsplit(launch.ready[0])))
    except BaseException:
        servers.stop()
        raise
    return ended.code if ended.code >= 0 else 128 - ended.code


def _holder(port: int | None) -> str:
    """Return the program that listens on a port. Other users' processes are not known."""
    with suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.pid and each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN:
                return _("{name} (process {pid})", name=psutil.Process(each.pid).name(), pid=each.pid)
    return _("another program")


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    with suppress(OSError), socket.create_connection(address, timeout=ANSWER_SECONDS):
        return True
    return False


def _responds(urls: Iterable[str]) -> bool:
    with suppress(OSError, ValueError):
        for url in urls:
            with DIRECT.open(url, timeout=ANSWER_SECONDS) as answer:
                if answer.status != 200:
                    return False
        return True
    return False
