"""Runs a command, and writes when each line of its output arrived: `[at 12.345678] line`.

`python -m flagcore_trainers.clock COMMAND...` passes the output on and ends with the status of the command. It times
the steps of programs that print a line per step without its time. A carriage return ends a line, as in progress bars.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence


def main(command: Sequence[str]) -> int:
    """Run `command`, and return its exit status. 127 if it cannot be started."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    assert process.stdout is not None
    is_new_line = True
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        arrived = f"[at {time.monotonic():.6f}] ".encode()
        for part in chunk.replace(b"\r", b"\n").splitlines(keepends=True):
            sys.stdout.buffer.write(arrived + part if is_new_line else part)
            is_new_line = part.endswith(b"\n")
        sys.stdout.buffer.flush()
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
