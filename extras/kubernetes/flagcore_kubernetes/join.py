"""Connects a pod of Kubernetes to `flag tune`: `python -m flagcore_kubernetes.join CONTROLLER[:PORT] [NAME]`.

It connects to the controller repeatedly. Both sides prove that they have FLAGCORE_TOKEN, without sending it. The
connection then becomes the channel of an agent. This host does not listen on a port.
"""

import hmac
import json
import os
import secrets
import socket
import subprocess
import sys
import time

from flagcore_hosts.connection import agent_command

TOKEN = "FLAGCORE_TOKEN"
PORT = 29471
MIN_TOKEN = 16
CONNECT_SECONDS, RETRY_SECONDS = 10.0, 1.0
LONGEST_LINE = 4096
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Socket options that close an idle connection 20 s after the loss of the other end."""


def token() -> bytes:
    """Return the secret, FLAGCORE_TOKEN. Raises ValueError if it is missing or too short."""
    secret = os.environ.get(TOKEN, "").strip()
    if len(secret) < MIN_TOKEN:
        raise ValueError(f"{TOKEN} must have at least {MIN_TOKEN} characters; set it with a Kubernetes Secret")
    return secret.encode()


def proof(key: bytes, *words: str) -> str:
    """Return the HMAC of `words` with the secret `key`, which proves that this side has the secret."""
    return hmac.new(key, json.dumps(words).encode(), "sha256").hexdigest()


def keep_alive(connection: socket.socket) -> None:
    """Enable the detection of a lost peer (TCP keepalive)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def main(controller: str, name: str = "") -> None:
    """Start an agent for each connection, until this process is ended. Raises ValueError for an invalid port or secret.

    As soon as an agent has started, this pod joins again, so that several trials can run at the same time.
    """
    host, _, port = controller.partition(":")
    if port and not port.isdecimal():
        raise ValueError(f"{controller}: the port is not a number")
    key, name = token(), name or socket.gethostname()
    last_state, agents = "", list[subprocess.Popen[bytes]]()
    while True:
        agents = [each for each in agents if each.poll() is None]
        count = len(agents)
        try:
            with _connect(host, int(port or PORT), key, name) as connection:
                if connection.recv(1, socket.MSG_PEEK):
                    agents.append(_start_agent(connection))
            connection_state = f"joined {controller} as {name}"
        except (OSError, ValueError) as error:
            connection_state = f"cannot join {controller}: {error}"
        if connection_state != last_state:
            print(f"flagcore: {connection_state}", file=sys.stderr, flush=True)
        last_state = connection_state
        if len(agents) == count:
            time.sleep(RETRY_SECONDS)


def _start_agent(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start an agent on a connection. The environment of the agent does not contain the secret."""
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    descriptor = connection.fileno()
    return subprocess.Popen(["sh", "-c", agent_command()], stdin=descriptor, stdout=descriptor, env=environment)


def _connect(host: str, port: int, key: bytes, name: str) -> socket.socket:
    """Return an authenticated connection to the controller. Raises OSError or ValueError."""
    connection = socket.create_connection((host, port), CONNECT_SECONDS)
    try:
        keep_alive(connection)
        their_nonce, nonce = _read_line(connection), secrets.token_hex(16)
        answer = {"host": name, "nonce": nonce, "proof": proof(key, "host", their_nonce, nonce, name)}
        connection.sendall(json.dumps(answer).encode() + b"\n")
        if not hmac.compare_digest(_read_line(connection), proof(key, "controller", nonce, their_nonce, name)):
            raise ValueError("the controller has another secret")
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _read_line(connection: socket.socket) -> str:
    """Return the next line, and leave later data in the connection. Raises OSError or ValueError."""
    text = b""
    while not text.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece or len(text) > LONGEST_LINE:
            raise ValueError("the connection closed")
        text += piece
    return text[:-1].decode("ascii")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m flagcore_kubernetes.join CONTROLLER[:PORT] [NAME]")
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
