"""Access to the dashboard: only from this machine, only with the token, and only for reading.

A web page of another site can make the user's browser send requests to loopback, also under a name of its own that
resolves to it. So a request must name loopback as its host, and must not come from another origin. Pages cannot be
framed, and load nothing from elsewhere.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

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
