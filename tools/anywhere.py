"""Runs the tests in other environments, which are made here with namespaces and variables: `make test-anywhere`.

In each, the tests that pass in a plain run must pass, no more may be skipped, and nothing may be left in HOME, the
temporary folder or the checkout. What is mounted is mounted in a namespace of the run, and is gone with it.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
MACHINE = ROOT / "tests" / "machine"
BUILD = ROOT / "build" / "anywhere"
ALONE = 12
"""Test files that run each by itself."""
SLOWER, START_S = 5.0, 60.0
"""The time of an environment ends after so many times the seconds of the plain run, and these seconds. On two cores,
`busy` and `1-core` take twice as long as the plain run."""
HIDDEN = "ssh sshd srun salloc sbatch sinfo slurmctld slurmd scontrol chromium chromium-browser google-chrome"
HIDE = f"""
PATH="$PATH:/usr/sbin"
for name in {HIDDEN}; do
    file=$(command -v $name) && mount --bind /dev/null "$(readlink -f "$file")"
done
:"""
EXPERIENCE = """
"$PYTHON" - "$W/base/earlier" <<'END'
import sys
from pathlib import Path
from flagcore import api
from tests.product.cli.conftest import Project
folder = Path(sys.argv[1])
folder.mkdir()
spec = Project(folder).spec(control={"max_trials": 3, "repeats": 0})
api.tune(spec, run_dir=folder / "run")
END
test -e "$HOME/.local/share/flagcore" """
MEMORY = """
awk '/^MemTotal/ {{$2 = {kib}}} /^Mem(Free|Available)/ {{$2 = int({kib} * 0.8)}} 1' /proc/meminfo > "$W/base/meminfo"
mount --bind "$W/base/meminfo" /proc/meminfo"""
CPUINFO = MACHINE / "cpuinfo.txt"
PROCESSOR = f"""
sed '0,/^==> {{name}} <==$/d;/^==>/,$d' "{CPUINFO}" > "$W/base/cpuinfo"
mount --bind "$W/base/cpuinfo" /proc/cpuinfo"""
UNPRIVILEGED = """
chown -R 65534:65534 "$W"
set -- setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps=+dac_read_search \
    --ambient-caps=+dac_read_search "$@"  # an interpreter below /root is readable"""


@dataclass(frozen=True)
class Environment:
    """How a run of the tests differs from a plain one.

    `shell` runs before the tests, in the same shell, in the folder of the checkout. `$W` is the folder of the run, with
    `home`, `tmp` and `base`, and `"$@"` the command that runs the tests. `root` means that `shell` needs rights of
    root, and namespaces of its own for mounts and for what `unshare` says. With `copy`, the tests run in a copy of the
    checkout, of this name. `busy` processes run beside the tests. `lacks` are words in the reason of a test that may be
    skipped there.
    """

    name: str
    shell: str = ":"
    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    root: bool = False
    unshare: tuple[str, ...] = ()
    copy: str = ""
    busy: int = 0
    python: str = ""
    alone: bool = False
    lacks: tuple[str, ...] = ()


PLAIN = Environment("plain")
ENVIRONMENTS = (
    Environment("1-core", "taskset -pc 0 $$ > /dev/null"),
    *(
        Environment(f"{count}-cores", variables={"PYTHONPATH": str(MACHINE / "many_cores"), "MANY_CORES": str(count)})
        for count in (2, 8, 64)
    ),
    *(
        Environment(f"cpuinfo-{name}", PROCESSOR.format(name=name), root=True)
        for name in re.findall(r"(?m)^==> (\w+) <==$", CPUINFO.read_text("utf-8"))
    ),
    Environment("no-fast-bf16", variables={"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
    *(Environment(f"{gib}-gib", MEMORY.format(kib=gib << 20), root=True) for gib in (4, 1024)),
    Environment("not-root", UNPRIVILEGED, root=True, copy="checkout", lacks=("root", "another user")),
    Environment("read-only-home", 'mount --bind "$W/home" "$W/home" && mount -o remount,ro,bind "$W/home"', root=True),
    Environment("no-home", "unset HOME"),
    Environment("experienced", EXPERIENCE),
    Environment("odd-path", copy="ein Weg mit ü"),
    *(Environment(name, variables={"LANG": name, "LC_ALL": name}) for name in ("C", "zh_CN.UTF-8", "tr_TR.UTF-8")),
    Environment("umask-077", "umask 077"),
    Environment("256-files", "ulimit -n 256"),
    Environment("no-network", "ip link set lo up", root=True, unshare=("--net",)),
    Environment("random-order", arguments=("--shuffle", "{seed}")),
    Environment("files-alone", alone=True),
    Environment("busy", busy=2),
    Environment("no-tools", HIDE, root=True, lacks=("ssh", "Slurm", "Chromium")),
    *(Environment(f"python{version}", python=version) for version in ("3.10", "3.11", "3.12", "3.13")),
)


@dataclass(frozen=True)
class Attempt:
    """The tests by what became of them, those skipped with the reason, and what else is wrong."""

    passed: frozenset[str]
    failed: frozenset[str]
    skipped: Mapping[str, str]
    problems: tuple[str, ...]
    seconds: float


def main() -> int:
    """Run the tests in the plain environment and in the chosen ones; return 1 if one of them is not like the plain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="tests to run, by default all")
    parser.add_argument("--list", action="store_true", help="only list the environments")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run in this environment; repeatable"
    )
    parser.add_argument("--draw", type=int, metavar="N", help="run in N environments drawn at random")
    parser.add_argument("--tests", type=int, metavar="N", help="run files drawn at random, of N tests in sum")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of what is drawn")
    parser.add_argument("--marks", default="not long and not slow", help="tests to run, as `pytest -m`")
    parser.add_argument("--jobs", type=int, default=3, help="processes of pytest")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for the plain run")
    options = parser.parse_args()
    if unknown := {*options.only} - {each.name for each in ENVIRONMENTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; see --list")
    draw = random.Random(options.seed)
    chosen = [each for each in ENVIRONMENTS if not options.only or each.name in options.only]
    if options.draw:
        chosen = draw.sample([each for each in chosen if not why_not(each)], options.draw)
    if options.list:
        for each in chosen:
            print(f"{each.name:18} {why_not(each)}".rstrip())
        return 0
    paths = options.paths or ["tests", "engines", "plugins", "extras"]
    if options.tests:
        paths = drawn(paths, options, draw)
    print(f"seed {options.seed}; logs in {BUILD.relative_to(ROOT)}", flush=True)
    plain = report(PLAIN, run(PLAIN, paths, options, options.limit), None)
    good = not plain.failed and not plain.problems
    for each in chosen:
        if reason := why_not(each):
            print(f"{each.name:18} skipped: {reason}", flush=True)
            continue
        its_paths, files = paths, test_files(paths)
        if each.alone:
            its_paths = draw.sample(files, min(ALONE, len(files)))
        outcome = compared(run(each, its_paths, options, SLOWER * plain.seconds + START_S), plain, each)
        good &= not report(each, outcome, plain).problems
    return 0 if good else 1


def why_not(environment: Environment) -> str:
    """Return why an environment cannot be made here, empty if it can."""
    if environment.root and os.geteuid() != 0:
        return "needs root"
    if environment.root and subprocess.run([*unshared(environment), "true"], capture_output=True).returncode:
        return "this system allows no namespaces"
    if environment.python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return "the plain run has it"
    if not interpreter(environment).exists():
        return f"make setup VENV=build/anywhere/{environment.name} PYTHON=python{environment.python}"
    return ""


def unshared(environment: Environment) -> list[str]:
    """Return the words before a command that runs in namespaces of its own."""
    return ["unshare", "--mount", "--propagation", "private", *environment.unshare] if environment.root else []


def interpreter(environment: Environment) -> Path:
    """Return the Python that runs the tests."""
    return BUILD / environment.name / "bin" / "python" if environment.python else Path(sys.executable)


def run(environment: Environment, paths: Sequence[str], options: argparse.Namespace, limit: float) -> Attempt:
    """Run the tests of `paths` in an environment, each command for at most `limit` seconds."""
    start, python, problems = time.monotonic(), interpreter(environment), list[str]()
    states: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "skipped": {}}
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="anywhere-", ignore_cleanup_errors=True) as made:
        work = Path(made)
        variables = {"W": made, "PYTHON": str(python), "HOME": f"{made}/home", "TMPDIR": f"{made}/tmp"}
        work.chmod(0o755)
        for name in ("home", "tmp", "base"):
            (work / name).mkdir()
        checkout, status = copied(work / environment.copy) if environment.copy else ROOT, changes()
        if environment.copy:
            folders = [checkout, *(file.parent for file in sorted(checkout.glob("*/*/pyproject.toml")))]
            variables |= {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
        junit, before = work / "base" / "junit.xml", work / "base" / "before"
        pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        pytest += ["-m", options.marks, f"--junitxml={junit}", f"--basetemp={work / 'base' / 'pytest'}"]
        pytest += ["--forks", str(0 if environment.alone else options.jobs)]
        pytest += [word.format(seed=options.seed) for word in environment.arguments]
        shell = f'set -e\n{environment.shell}\nfind "$W/home" "$W/tmp" > "$W/base/before"\nexec "$@"'
        before.touch()
        with (BUILD / f"{environment.name}.log").open("w") as log, busy(environment.busy):
            for these in [[path] for path in paths] if environment.alone else [list(paths)]:
                junit.unlink(missing_ok=True)
                argv = [*unshared(environment), "sh", "-c", shell, "sh", *pytest, *these]
                given = {**os.environ, **variables, **environment.variables}
                code = limited(argv, limit, cwd=checkout, env=given, stdout=log, stderr=log)
                if code not in (0, 1, 5) or not junit.exists():  # 5: no test was selected
                    problems.append(f"status {code}")
                for name, state, reason in results(junit):
                    states[state][name] = reason
        left = {str(each) for place in ("home", "tmp") for each in (work / place).rglob("*")}
        if left := left - {*before.read_text().splitlines()}:
            problems.append(f"left behind: {', '.join(sorted(left)[:8])}")
        if changes() != status:
            problems.append(f"changed the checkout: {changes()}")
    passed = frozenset(states["passed"].keys() - states["failed"].keys())  # a test whose teardown fails is both
    failed, seconds = frozenset(states["failed"]), time.monotonic() - start
    return Attempt(passed, failed, states["skipped"], tuple(problems), seconds)


def compared(outcome: Attempt, plain: Attempt, environment: Environment) -> Attempt:
    """Return the outcome with what is worse than in the plain one among its problems."""
    problems = list(outcome.problems)
    if failed := sorted(outcome.failed - plain.failed):
        problems.append(f"failed: {', '.join(failed)}")
    more = sorted(
        f"{name} ({reason})"
        for name, reason in outcome.skipped.items()
        if name not in plain.skipped and not any(word in reason for word in environment.lacks)
    )
    if more:
        problems.append(f"skipped: {', '.join(more)}")
    seen = outcome.passed | outcome.failed | outcome.skipped.keys()
    if not environment.alone and (missing := sorted((plain.passed | plain.failed) - seen)):
        problems.append(f"{len(missing)} tests did not run: {', '.join(missing[:8])}")
    return Attempt(outcome.passed, outcome.failed, outcome.skipped, tuple(problems), outcome.seconds)


def report(environment: Environment, outcome: Attempt, plain: Attempt | None) -> Attempt:
    """Print an outcome and return it."""
    counts = f"{len(outcome.passed):6} passed {len(outcome.failed):3} failed {len(outcome.skipped):4} skipped"
    print(f"{environment.name:18} {counts} {outcome.seconds:6.0f} s", flush=True)
    for line in (*outcome.problems, *(f"failed: {name}" for name in sorted(outcome.failed) if plain is None)):
        print(f"  {line}", flush=True)
    return outcome


def test_files(paths: Sequence[str]) -> list[str]:
    """Return the test files of these paths."""
    found = [[*(ROOT / path).rglob("test_*.py")] or [ROOT / path.partition("::")[0]] for path in paths]
    return sorted({str(file.relative_to(ROOT)) for files in found for file in files})


def drawn(paths: Sequence[str], options: argparse.Namespace, draw: random.Random) -> list[str]:
    """Return test files drawn at random that have at most `options.tests` selected tests together."""
    argv = [sys.executable, "-m", "pytest", "-qq", "--collect-only", "-p", "no:cacheprovider", "-m", options.marks]
    listed = subprocess.run([*argv, *paths], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    counts = {file: int(count) for file, count in re.findall(r"(?m)^(\S+\.py): (\d+)$", listed)}
    left, files = options.tests, list[str]()
    for file in draw.sample(sorted(counts), len(counts)):
        if counts[file] <= left:
            files.append(file)
            left -= counts[file]
    return files


def copied(folder: Path) -> Path:
    """Copy the files of the checkout that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def changes() -> str:
    """Return what git says of the checkout."""
    argv = ["git", "status", "--porcelain"]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stdout


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep this many processes busy."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def limited(argv: Sequence[str], seconds: float, **how: Any) -> int:
    """Run a command and return its exit status; end it after so long."""
    process = subprocess.Popen(argv, start_new_session=True, **how)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def results(junit: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the state and the reason of each test of a report."""
    if not junit.exists():
        return
    for case in ElementTree.parse(junit).iter("testcase"):
        name, tags = f"{case.get('classname')}::{case.get('name')}", {each.tag: each for each in case}
        state = "failed" if {"failure", "error"} & tags.keys() else "skipped" if "skipped" in tags else "passed"
        yield name, state, tags["skipped"].get("message", "") if state == "skipped" else ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
