"""The server of `flag dashboard`: an overview of the runs, their reports, and Optuna's dashboard of their studies."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from flagcore.api.common.runs import RESULT
from flagcore.api.dashboard.guard import Environ, Guard, StartResponse, WsgiApp
from flagcore.api.dashboard.overview import links_out, overview
from flagcore.api.reporting.report import report
from flagcore.errors import FlagError, UsageError
from flagcore.i18n import _
from flagcore.report.overview import overview_page
from flagcore.store.studies import Studies
from flagcore.store.trials import JOURNAL

HOST = "127.0.0.1"
REFRESH_SECONDS = 5
THREADS = 4
RUNS_PATH = "/runs/"
REPORT_POLICY = (
    "sandbox allow-scripts allow-popups allow-downloads; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The policy of reports beside that in the page, which lists its scripts. A report has no access to other pages."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A server that listens, and its URL with the token."""

    url: str
    server: Any

    def serve(self) -> None:
        """Serve until the process is interrupted."""
        self.server.run()

    def close(self) -> None:
        """Stop listening."""
        self.server.close()


def dashboard(runs: Path | str, *, port: int = 0, without: Collection[str] = ()) -> Dashboard:
    """Return a server of the runs below a folder, which listens on loopback only. Port 0 is any free port.

    Requires the extra `dashboard`. Raises UsageError for a missing folder, a missing package or a port in use.
    """
    root = Path(runs)
    if not root.is_dir():
        raise UsageError(_("{folder} is not a folder; give the folder of the runs", folder=root))
    try:
        from optuna_dashboard import wsgi
        from waitress import create_server
    except ImportError as error:
        text = _("{package} is not installed: run `pip install 'flagcore[dashboard]'`", package=error.name)
        raise UsageError(text) from None
    studies, token = Studies(root), secrets.token_urlsafe(32)
    app = Guard(_App(studies, wsgi(studies), without), token)
    try:
        server = create_server(app, host=HOST, port=port, threads=THREADS, ident=None, max_request_body_size=1 << 16)
    except OSError as error:
        raise UsageError(_("cannot listen on port {port}: {reason}", port=port, reason=error.strerror)) from None
    return Dashboard(url=f"http://{HOST}:{server.effective_port}/?token={token}", server=server)


class _App:
    """Pages by path: `/` is the overview, `/runs/NAME` a report, everything else is Optuna's dashboard."""

    def __init__(self, studies: Studies, optuna_app: WsgiApp, without: Collection[str]) -> None:
        self._studies, self._optuna_app, self._without = studies, optuna_app, tuple(without)
        self._lock = Lock()
        self._report: Callable[[Path, object], str] = lru_cache(maxsize=8)(self._new_report)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = os.fsdecode(environ.get("PATH_INFO", "").encode("latin-1"))
        if path == "/":
            return _html(start_response, self._overview())
        if not path.startswith(RUNS_PATH):
            return self._optuna_app({"HTTP_ACCEPT_ENCODING": "", **environ}, start_response)  # it requires the header
        folder = self._studies.folders().get(path.removeprefix(RUNS_PATH))
        if folder is None:
            return _error(start_response, "404 Not Found", _("There is no such run."))
        if links := links_out(folder, self._studies.root):
            text = _("This run has links that lead out of the folder: {names}", names=", ".join(links))
            return _error(start_response, "403 Forbidden", text)
        try:
            with self._lock:  # one at a time: a report of a running run loads plugins
                page = self._report(folder, _stamp(folder))
        except FlagError as error:
            return _error(start_response, "409 Conflict", str(error))
        return _html(start_response, page, [("Content-Security-Policy", REPORT_POLICY)])

    def _overview(self) -> str:
        lines = overview(self._studies)
        links = {line.name: RUNS_PATH + quote(os.fsencode(line.name)) for line in lines}
        return overview_page(str(self._studies.root), lines, links, REFRESH_SECONDS, time.time())

    def _new_report(self, folder: Path, stamp: object) -> str:
        return report(folder, without=self._without)


def _stamp(folder: Path) -> object:
    """Return what changes with the content of a run."""
    files = [folder / name for name in (RESULT, JOURNAL) if (folder / name).exists()]
    return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in map(os.stat, files))


def _html(start_response: StartResponse, page: str, headers: list[tuple[str, str]] | None = None) -> Iterable[bytes]:
    body = page.encode("utf-8", "replace")
    length = ("Content-Length", str(len(body)))
    start_response("200 OK", [("Content-Type", "text/html; charset=utf-8"), length, *(headers or [])])
    return [body]


def _error(start_response: StartResponse, status: str, text: str) -> Iterable[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode("utf-8", "replace")]
