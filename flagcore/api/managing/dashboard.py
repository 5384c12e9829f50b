"""The server of `flag dashboard`: an overview of the runs, their reports, and Optuna's dashboard of their studies.

Access is only from this machine, only with the token, and only for reading. A web page of another site can make the
user's browser send requests to loopback, also under a name of its own that resolves to it. So a request must name
loopback as its host, and must not come from another origin. Pages cannot be framed, and load nothing from elsewhere.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

from flagcore.api.managing.overview import links_out, overview
from flagcore.api.managing.report import report
from flagcore.api.runs import RESULT
from flagcore.errors import FlagError, UsageError
from flagcore.i18n import _
from flagcore.report.page.html import overview_page
from flagcore.tuner.store.studies import Studies
from flagcore.tuner.store.trials import JOURNAL

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


Environ: TypeAlias = "dict[str, Any]"
StartResponse: TypeAlias = Callable[..., Any]
WsgiApp: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of all responses; a response may have a policy of its own."""
TEXT = ("Content-Type", "text/plain; charset=utf-8")


class Guard:
    """Checks each request before `app` gets it.

    The token in the URL is exchanged for a cookie, so that it stays out of the browser's history and of links.
    """

    def __init__(self, app: WsgiApp, token: str) -> None:
        self._app, self._token = app, token
        self.cookie = f"flagcore-{hmac.digest(token.encode(), b'name', 'sha256').hex()[:8]}"
        """The name of the cookie. Dashboards on several ports share the cookies of a host."""

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            own = {name.title() for name, _value in headers}
            added = [(name, value) for name, value in HEADERS.items() if name.title() not in own]
            return start_response(status, [*headers, *added], *rest)

        if problem := _problem(environ):
            return _answer(start, *problem)
        query = parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if given and self._is_token(given[0]):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            path = quote(environ.get("PATH_INFO", "/").lstrip("/\\").encode("latin-1"))
            location = f"/{path}?{rest}" if rest else f"/{path}"
            cookie = f"{self.cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            start("303 See Other", [("Location", location), ("Set-Cookie", cookie), TEXT])
            return [b""]
        if not self._is_token(_cookie(environ, self.cookie)):
            text = "This page needs the token in the URL that `flag dashboard` prints.\n"
            return _answer(start, "403 Forbidden", text)
        return self._app(environ, start)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._token.encode())


def _problem(environ: Environ) -> tuple[str, str] | None:
    """Return the status and the text for a request that is refused whatever its token is."""
    host = environ.get("HTTP_HOST", "")
    if not LOOPBACK.fullmatch(host):
        return "421 Misdirected Request", "Open the dashboard as http://127.0.0.1:PORT.\n"
    origin = environ.get("HTTP_ORIGIN")
    if origin is not None and origin != f"http://{host}":
        return "403 Forbidden", "Requests of other sites are refused.\n"
    if environ.get("HTTP_SEC_FETCH_SITE") == "cross-site" and environ.get("HTTP_SEC_FETCH_MODE") != "navigate":
        return "403 Forbidden", "Requests of other sites are refused.\n"
    if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
        return "405 Method Not Allowed", "The dashboard can only be read.\n"
    return None


def _cookie(environ: Environ, name: str) -> str:
    try:
        found = SimpleCookie(environ.get("HTTP_COOKIE", "")).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def _answer(start: StartResponse, status: str, text: str) -> Iterable[bytes]:
    start(status, [TEXT])
    return [text.encode()]
