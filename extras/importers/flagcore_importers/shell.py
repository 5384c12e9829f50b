"""Finds the external commands that a shell script starts.

bash runs the script, and `trace.bash` records and skips the commands.
"""

import fcntl
import os
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flagcore.domain.files import open_regular, read_regular
from flagcore.errors import SpecError

TIMEOUT_SECONDS, MOST_BYTES = 8.0, 1 << 29
"""The time of a script, and the memory of each of its processes."""
SCRIPT_FIX = "give the command that the script starts, such as torchrun, instead of the script"
SHELLS = ("bash", "sh", "dash")
HOSTS_FUNCTION = "() { local i; for ((i = 0; i < ${SLURM_NNODES:-1}; i++)); do echo localhost; done; }"
"""A shell function that replaces Slurm's `scontrol` outside an allocation. Scripts list their hosts with it."""
TRACE_FUNCTIONS = tuple(f"BASH_FUNC_{name}%%" for name in ("scontrol", "tee", "xargs"))
"""Functions that the tracer defines. A script may export its own, for the shells that it starts."""
HOSTS = "NHOSTS"
"""The number of hosts that batch systems other than Slurm allocate. A trace has a file with their names."""
_HOSTS_FILES = ("PBS_NODEFILE", "SGE_JOB_HOSTLIST", "PE_HOSTFILE", "PJM_O_NODEINF", "LSB_DJOB_HOSTFILE")
_UNSET = "TRACE_UNSET"
_READS = re.compile(r"^\s*(#|(sudo )?(chmod|chown|cp|mv|ln|rm|ls|cat|head|sed|dos2unix|install|echo|test|\[\[?)\s)")
"""The start of a comment, or of a command, that does not start the scripts that it names."""
IGNORED_VARIABLES = ("BASH_ENV", "FLAGCORE_TRACE", "SHLVL", "PWD", "OLDPWD", "_", _UNSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A command that a script would run: its words, its folder, and the environment variables that the script set.

    `unset`: the names of the variables that the script had read by then, but that are not set.
    """

    words: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    unset: tuple[str, ...] = ()


def is_script(command: Sequence[str], directory: str | None) -> bool:
    """Return whether a command runs a shell script."""
    return Path(command[0]).name in SHELLS or _names_shell(Path(directory or ".", command[0]))


def names_script(command: Sequence[str], directory: str | None) -> bool:
    """Return whether a command is a shell with the path of a file, or the path of a shell script."""
    if Path(command[0]).name in SHELLS:
        return _names_file(command[1:], directory) and "-c" not in command[1:]
    return "/" in command[0] and _names_shell(Path(directory or ".", command[0]))


def is_shell_script(name: str, text: str) -> bool:
    """Return whether a file with this name and text is a script of a shell."""
    line = text.partition("\n")[0]
    if line.startswith("#!"):
        return any(Path(word).name in SHELLS for word in line[2:].split())
    return Path(name).suffix in (".sh", ".bash") or ("." not in Path(name).name and "\n" in text)


def inlined(words: Sequence[str], scripts: Mapping[str, str]) -> list[str]:
    """Return a command with the texts of `scripts` in place of their paths, or nothing if it starts none of them.

    `scripts`: their texts by path, or by name, which stands for that name in any folder.
    """
    names = [os.path.basename(word) for word in words]
    place = next((n for n, word in enumerate(words) if _script_at(word, scripts)), len(words))
    before = enumerate(words[: min(place, len(words) - 1)])
    texts = [n + 1 for n, word in before if re.fullmatch(r"-\w*c", word) and {*names[:n]} & {*SHELLS}]
    if texts:
        n = texts[0]
        text = _with_texts(words[n], scripts)
        return [*words[:n], text, *words[n + 1 :]] if text != words[n] else []
    if place == len(words) or (place and {"-c", "-m"} & {*words[:place]}):
        return []
    start = next((n for n, name in enumerate(names[:place]) if name in SHELLS), place)
    return [*words[:start], "bash", "-c", _with_texts(_script_at(words[place], scripts), scripts), *words[place:]]


def _script_at(path: str, scripts: Mapping[str, str]) -> str:
    return scripts.get(path) or scripts.get(os.path.basename(path), "")


def _with_texts(text: str, scripts: Mapping[str, str], depth: int = 0) -> str:
    """Return the text of a script that runs the texts of other scripts instead of their files."""

    def started(match: re.Match[str]) -> str:
        script = _script_at(match[3], scripts)
        if script == text or _READS.search(re.split(r"[;&|\n]", text[: match.start()])[-1]):
            return match[0]
        quoted = shlex.quote(_with_texts(script, scripts, depth + 1))
        return f"eval {quoted}" if match[1] else f"bash -c {quoted} bash"  # its name would be found again

    shells = rf"(?:\S*/)?(?:{'|'.join(SHELLS)})[ \t]+(?:-[a-z]+[ \t]+)*"
    names = sorted(scripts, key=len, reverse=True)
    paths = "|".join(("" if "/" in name else r"[\w./~${}-]*") + re.escape(name) for name in names)
    pattern = rf"(?<![\w./-])(?:(source|\.)[ \t]+|{shells})?([\"']?)({paths})\2(?![\w./-])"
    return re.sub(pattern, started, text) if scripts and depth < 3 else text


def trace_script(
    command: Sequence[str],
    directory: str | None,
    variables: Mapping[str, str],
    *,
    elsewhere: int = 0,
    unset: Iterable[str] = (),
) -> tuple[tuple[Record, ...], str]:
    """Return the external commands that a script would run, in order, and why it failed (empty if it succeeded).

    `variables` are added to the environment. `elsewhere`: 1 if the script is for another machine, 2 if it also goes on
    where it gives up. `unset`: the variables that are not set, as far as the caller of the script knows. Raises
    SpecError if the script cannot be traced.
    """
    argv = _argv(command, directory)
    environment = {"USER": os.path.basename(os.path.expanduser("~")), **os.environ, **variables}
    environment |= {"TRACE_ELSEWHERE": str(elsewhere or ""), _UNSET: " ".join(unset)}
    with (
        tempfile.TemporaryDirectory(prefix="flagcore-trace-") as folder,
        tempfile.NamedTemporaryFile("w", prefix="flagcore-hosts-") as names,
    ):
        if HOSTS in variables:
            names.writelines(f"localhost{n or ''}\n" for n in range(int(variables[HOSTS])))  # scripts count names
            names.flush()
            environment |= dict.fromkeys(_HOSTS_FILES, names.name)
        hosts = {} if "SLURM_JOB_NODELIST" in os.environ else {"BASH_FUNC_scontrol%%": HOSTS_FUNCTION}
        trace_variables = {**hosts, "BASH_ENV": str(Path(__file__).with_name("trace.bash")), "FLAGCORE_TRACE": folder}
        problem = _run_traced(argv, directory, {**environment, **trace_variables})
        files = sorted(Path(folder).iterdir(), key=lambda file: (file.stat().st_mtime_ns, file.name))
        records = [found for file in files if (found := _read_record(file, environment)) is not None]
    for kind, record in records:
        if kind == "block":
            location = record.words[0].replace(":", ", line ", 1)
            raise _script_error(command, f"redirects a block to a file, which cannot be skipped: {location}")
    return tuple(record for _, record in records), problem


def _argv(command: Sequence[str], directory: str | None) -> list[str]:
    """Return the words with which bash runs a script. Raises SpecError if bash or the script is not here."""
    bash = shutil.which("bash")
    if bash is None:
        raise _script_error(command, "is a script, but bash is not installed to read it")
    words = command[1:] if Path(command[0]).name in SHELLS else command
    if not _names_file(words, directory):
        raise _script_error(command, "is a script that does not exist")
    file = _file_in(words)
    with suppress(OSError):  # bash reports a file that cannot be read
        if file != "-c" and b"\r\n" in read_regular(Path(directory or ".", file)):
            problem, fix = "is a script with Windows line ends", f"remove them: sed -i 's/\\r$//' {file}"
            raise SpecError(key="train.command", value=" ".join(command), problem=problem, fix=fix)
    return [bash, *words]


def _names_file(words: Sequence[str], directory: str | None) -> bool:
    file = _file_in(words)
    return file == "-c" or (bool(file) and os.path.isfile(Path(directory or ".", file)))


def _file_in(words: Sequence[str]) -> str:
    """Return the file in a shell's words: `-c` for a text, and an empty text if there is none."""
    return next((word for word in words if word == "-c" or not word.startswith("-")), "")


def _names_shell(file: Path) -> bool:
    with suppress(OSError), open_regular(file) as script:
        first_line = script.readline(200).decode("utf-8", errors="replace")
        return first_line.startswith("#!") and any(Path(word).name in SHELLS for word in first_line[2:].split())
    return False


def _run_traced(argv: Sequence[str], directory: str | None, environment: Mapping[str, str]) -> str:
    """Run a traced script until all its processes end. Return why it failed, or an empty string if it succeeded.
    Processes of a pipeline may outlive the script. They inherit a pipe, which closes when the last process ends."""
    read_end, write_end = os.pipe()
    inherited_pipe = fcntl.fcntl(write_end, fcntl.F_DUPFD, 100)  # scripts use lower file descriptors
    os.close(write_end)
    with os.fdopen(read_end), tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                argv,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(inherited_pipe,),
            )
        except OSError as error:
            return f"cannot start: {error.strerror or error}"
        finally:
            os.close(inherited_pipe)
        try:
            with suppress(ProcessLookupError):  # it has ended
                resource.prlimit(process.pid, resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
            has_ended = select.select([read_end], [], [], TIMEOUT_SECONDS)[0]
        finally:  # also if a signal interrupts flagcore
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == 0 or not has_ended:
            return "" if has_ended else f"did not end in {TIMEOUT_SECONDS:g} s"
        output.seek(max(0, output.seek(0, os.SEEK_END) - (1 << 20)))
        text = re.sub(r"\x1b\[[\d;]*m|[^\S\n]|[^\s -\uffff]", " ", output.read().decode("utf-8", errors="replace"))
        lines = re.findall(r"^(?!\+|Try |.*: warning: setlocale: ).*\S", text, re.MULTILINE)
    return f"ends with exit code {process.returncode}: {lines[-1] if lines else 'it printed nothing'}"


def _read_record(file: Path, environment: Mapping[str, str]) -> tuple[str, Record] | None:
    """Return the kind of a record, and the record, or None if the record of a killed script is incomplete."""
    text = file.read_bytes().decode("utf-8", errors="surrogateescape")
    if not text.endswith("\0"):
        return None
    kind, directory, count, *fields = text.split("\0")
    words, variables = tuple(fields[: int(count)]), dict(_variables(fields[int(count) :]))
    script_variables = {
        name: value
        for name, value in variables.items()
        if environment.get(name) != value and name not in IGNORED_VARIABLES
    }
    unset = tuple(variables.get(_UNSET, "").split())
    return kind, Record(words=words, directory=directory, environment=script_variables, unset=unset)


def _variables(entries: Iterable[str]) -> Iterable[tuple[str, str]]:
    for entry in entries:
        name, equals, value = entry.partition("=")
        if equals and name not in TRACE_FUNCTIONS and not name.startswith("__fc_"):  # `set -a` exports all
            yield name, value


def _script_error(command: Sequence[str], problem: str) -> SpecError:
    return SpecError(key="train.command", value=" ".join(command), problem=problem, fix=SCRIPT_FIX)
