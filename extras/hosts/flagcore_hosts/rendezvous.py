"""Checks that the hosts of a trial can connect. Imports only the standard library.

The program runs once on each host. The first host listens on MASTER_PORT until all others have connected to it. Each
prints the port and, on failure, the reason.
"""

import os
import socket
import sys
import time

SECONDS = 5.0
RETRY_SECONDS = 0.1


def listen(port: int, others: int) -> None:
    """Wait until each of the other hosts has connected. Raises OSError if the port cannot be used."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=others) as server:
        server.settimeout(SECONDS)
        try:
            for _ in range(others):
                server.accept()[0].close()
        except TimeoutError:
            pass  # the other hosts report the reason


def connect(host: str, port: int) -> None:
    """Connect to the first host. Retries, because that host may not listen yet. Raises OSError."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection((host, port), max(RETRY_SECONDS, deadline - time.monotonic())).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


def main() -> int:
    """Check this host, and return the exit code. If the port cannot be used, the other hosts do not wait."""
    port, rank = os.environ["MASTER_PORT"], int(os.environ["NODE_RANK"])
    try:
        if rank:
            connect(os.environ["MASTER_ADDR"], int(port))
        else:
            listen(int(port), int(os.environ["NNODES"]) - 1)
    except (OSError, ValueError, OverflowError) as error:
        print(port, getattr(error, "strerror", None) or error)
        return int(rank == 0)
    print(port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
