"""The management tool of simulated devices: prints their table, with the memory that processes state at the driver."""

import fcntl
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Print all devices of the machine, whatever is visible."""
    driver = Path(os.environ.get("SIMU_DRIVER", "/var/run/simu"))
    try:
        machine = json.loads((driver / "devices.json").read_text("utf-8"))
    except OSError:
        print("simu-smi: no driver", file=sys.stderr)
        sys.exit(9)
    print("+------------------------------------------------------------------------------+")
    print("| SIMU-SMI 1.0     Driver Version: 1.0                                         |")
    print("| ID   Name                     | Bus-Id               | Load                  |")
    print("| Temp Pwr:Usage/Cap            | Memory-Usage         |                       |")
    print("|===============================+======================+=======================|")
    rows = []
    for index in range(machine["count"]):
        processes = _processes(driver / str(index))
        used, load = sum(processes.values()) >> 20, 100 if processes else 0
        print(f"| {index:<4} {machine['name']:<24} | 0000:{index + 14:02x}:00.0         | {load}% |")
        print(f"| 41C  60W / 400W               | {used}MiB / {machine['memory_bytes'] >> 20}MiB |     |")
        rows += [f"| {index} {pid} {_name(pid)} {size >> 20} MiB |" for pid, size in processes.items()]
    print("+------------------------------------------------------------------------------+")
    print("| Processes: |", *rows, sep="\n")


def _processes(folder: Path) -> dict[int, int]:
    """Return the bytes of each process on a device. A process holds a lock on its file until it ends."""
    found = {}
    for path in folder.glob("*"):
        try:
            with path.open() as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found[int(path.name)] = int(file.read() or 0)
        except OSError:
            continue
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8").strip()
    except OSError:
        return "?"


if __name__ == "__main__":
    main()
