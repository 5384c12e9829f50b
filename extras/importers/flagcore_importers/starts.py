"""Finds the programs that a command or a file starts: which form it has, and what its containers and scripts start."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from flagcore.domain.launch import Start
from flagcore.errors import SpecError, UsageError
from flagcore.i18n import _
from flagcore_importers.batch import SLURM, UNIT, batch_job, programs_of, slurm_options, step_job
from flagcore_importers.containers import CONTAINERS, Images, container, container_run, image_start, services_of
from flagcore_importers.declared import read_table, servers_of
from flagcore_importers.kubernetes import HALVES, SCALERS, all_pods, containers_in, of_kind, with_maps, with_runtimes
from flagcore_importers.shell import SHELLS, is_script, names_script, trace_script
from flagcore_importers.values import literal_variables, load_documents, text_of

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_APPTAINER = ("apptainer", "singularity")
_MPI = ("mpirun", "mpiexec", "orterun", "jsrun", "aprun")
_LAUNCHERS = ("srun", *_MPI, *_APPTAINER, "numactl", "taskset", "timeout", "time", "sudo")
_TERMINALS = ("tmux", "screen", "pm2")  # they start the commands in their arguments, each in one word
_IMAGE_FILE = re.compile(r"^docker://|\.sif$")
_IMAGE_OF_LAUNCHER = re.compile(r"(?:^docker://|^--(?:container-)?image=(?:docker:)?)(\S+)")
_HERE_DOCUMENT = re.compile(
    r"kubectl .*<<-? *['\"]?(\w+)['\"]?.*\n((?:.*\n)*?)\1\b|<<-? *['\"]?(\w+)['\"]? *\| *kubectl .*\n((?:.*\n)*?)\3\b"
)
"""Manifests in a script that gives them to kubectl."""
_MARKDOWN = re.compile(r"(?m)^ {0,3}```(?:bash|sh|shell|console|yaml|yml|dockerfile)?[ \t]*\n((?:.*\n)*?) *```")
_MANIFEST = re.compile(r"""\s*((#.*|\.\.\.)\n\s*)*(---|\{?\s*[\w"'./-]+\s*:(\s|$)|\{\s*["'])""")
"""The start of YAML."""
_BROKEN_LINE = re.compile(r"\\[ \t]+(#.*)?\n")
"""The end of a line that should continue: pages often have blanks or comments after the backslash."""
_BLOCK = re.compile(
    r"(?m)((?:^|;)[ \t]*(?:\}|\)|done|fi|esac)[ \t]*(?:<[^>\n]*)?)(?:\d*|&)>+\|?[ \t]*(?!/dev/|[&(|>\s])"
    r"(?:\"[^\"\n]*\"|[^\s;&|])+"
)
"""The end of a block whose output goes to a file: nothing of it is written."""
_PLACEHOLDER = re.compile(r"""(?<![<\w)])<([A-Za-z][^<>|&;()$`'"\n]*(?<![\s=-]))>""")
"""`<words>` that the user should replace, which a shell would read as redirections."""


_MAPPINGS = {"deploy", "labels", "limits", "metadata", "parallelism", "requests", "reservations", "resources"}
_MAPPINGS |= {"securityContext", "selector", "services", "spec", "template", "trainer"}
_LISTS = {"containers", "devices", "env", "envFrom", "initContainers", "tasks", "volumeMounts"}
"""Keys of manifests, Helm values and compose files whose values have one type; elements of the lists are mappings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedScript:
    """A script that could not be read to its end. `unset`: its variables that are not set."""

    reason: str
    unset: tuple[str, ...]


Program: TypeAlias = Start | FailedScript


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads commands and files in `directory`. `images`: the entry points of known images."""

    images: Images
    directory: str

    def programs(self, words: Sequence[str], text: str | None) -> Iterator[Program]:
        """Yield the programs that a command, or a file with `text`, starts. Raises SpecError, UsageError."""
        file = Path(self.directory, words[-1] if words else "")
        starts: Iterable[Program]
        if text is None:
            starts = [Start(words=tuple(words))]
        elif parts := _parts(words, text, is_page=file.suffix not in (".yaml", ".yml")):
            starts = [start for part in parts for start in self.programs(*part)]
        elif UNIT.search(text):
            starts = programs_of(text, file.parent, self.images)
        elif re.search(r"(?m)^FROM\s", text) and re.search(r"(?m)^(CMD|ENTRYPOINT)\s", text):
            starts = [image_start(text, self.images)]
        elif _MANIFEST.match(text):
            starts = _of_settings(words, text) or self._manifest(text, file)
        else:
            starts = self._of_script(tuple(words), text)
        for start in starts:
            if isinstance(start, Start):
                yield from self._inner(_with_files(start, file.parent))
            else:
                yield start

    def _of_script(self, words: tuple[str, ...], text: str, options: Mapping[str, str] | None = None) -> list[Start]:
        """Return a script with its batch job, or, if its hosts have servers of their own, what it starts on each.

        `options`: of the command that submits it.
        """
        joined = _readable(text.replace("\r\n", "\n"))
        script = ("bash", "-c", joined, *words[1:]) if joined != text or not words else words
        batch = replace(batch_job(text, self.directory, options), words=script)
        if not (1 < batch.hosts <= 16 and 'case "$NODE_RANK" in' in text):  # each host takes time
            return [batch]
        jobs = [{**batch.job, "SLURM_NODEID": str(rank)} for rank in range(batch.hosts)]
        programs = [each for job in jobs for each in self._inner(replace(batch, job=job, hosts=1))]
        return [each for each in programs if isinstance(each, Start)]

    def _manifest(self, text: str, file: Path) -> list[Start]:
        """Return the programs of `file`: manifests, Helm values or a compose file with `text`. Raises UsageError."""
        folder = file.parent
        try:
            text = re.sub(r"(?m)^\.\.\.$", "", text)  # parts of pages
            text = re.sub(r"(?m): \{\{ *\.?([\w.]+) *\}\}", r": '[\1]'", text)  # placeholders
            documents = with_maps(with_runtimes([*load_documents(text)]), folder)
            scalers = {str(each["kind"]): str(each.get("spec")) for each in of_kind(documents, SCALERS)}  # not read
            found = [
                replace(start, left_out={**start.left_out, **scalers})
                for each in documents
                for start in [*servers_of(each, self.images)]
                or (*services_of(text, each, self.images, folder), *all_pods(each, self.images))
            ] or [start for each in containers_in(documents) for start in all_pods(each, self.images)]
            is_pair = any(each.role == HALVES[0] for each in found)  # a server that decodes alone prefills, too
            return found if is_pair else [replace(each, role="") for each in found]
        except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
            name = file.name if file.is_file() else "stdin"
            reason = " ".join(str(error).split()).replace('in "<unicode string>",', "at")
            problem = _("{file} is not valid YAML: {reason}", file=name, reason=reason)
            if re.search(r"(?m)\{\{|^\s*[$]?\{\w+\}", text):
                problem = _(
                    "the file is a template: give it after `envsubst`, `helm template` or the like has filled it"
                )
            raise UsageError(problem) from None
        except (AttributeError, LookupError, TypeError, RecursionError) as error:  # types are checked only now
            for key, value, problem in (found for each in load_documents(text) for found in _wrong_types(each)):
                raise SpecError(file=file.name, key=key, value=value, problem=problem) from error
            raise UsageError(_("the file has another structure than a manifest or a compose file")) from error

    def _inner(self, start: Start, depth: int = 0) -> Iterator[Program]:
        """Yield the programs that a container, a shell or a script starts. Yield any other program itself."""
        start = _unwrapped(_written(start))
        words, names = start.words, [os.path.basename(word) for word in start.words]
        if names[:1] and names[0] in SLURM:
            options, rest = slurm_options(words[1:])
            if names[0] == "sbatch" and depth < 3 and (jobs := self._submitted(start, options, rest)):
                for each in jobs:
                    yield from self._inner(each, depth + 1)
                return
            start = self._step(start, options, tuple(rest) if names[0] == "salloc" else words)
            words, names = start.words, [os.path.basename(word) for word in start.words]
        verb, file, shell = _verb(names), _image_file(words, names), _shell(words)
        is_terminal = names[:1] and names[0] in _TERMINALS
        if verb < shell:
            yield from self._inner(container_run(start, words[verb + 1 :], self.images))
        elif file < len(words):
            yield container(start, self._image_of(words[file]), None, words[file + 1 :], self.images)
        elif depth < 3 and is_terminal and (lines := [word for word in words if " " in word]):
            for line in lines:
                yield from self._inner(replace(start, words=("bash", "-c", line)), depth + 1)
        elif depth < 3 and (found := self._script(words, names, shell)):
            yield from self._traced(start, *found, depth + 1)
        elif words or start.image:
            yield replace(start, version=start.version or self._release(words))

    def _step(self, start: Start, options: Mapping[str, str], words: tuple[str, ...]) -> Start:
        """Return `start` with `words`, and with the hosts and variables of a step of Slurm with these options."""
        step = step_job(options, start.job, self.directory) if options else Start()
        hosts, devices = max(start.hosts, step.hosts), start.devices or step.devices
        return replace(start, words=words, job=step.job or start.job, hosts=hosts, devices=devices)

    def _release(self, words: Sequence[str]) -> str:
        """Return the release of the image that an option of a launcher names, or an empty text."""
        named = (_IMAGE_OF_LAUNCHER.search(word) for word in words)
        return next((container(Start(), each[1], None, None, self.images).version for each in named if each), "")

    def _submitted(self, start: Start, options: Mapping[str, str], rest: Sequence[str]) -> list[Start]:
        """Return what `sbatch` with these options and words starts; nothing if its script is not here."""
        text = options.get("wrap") or (text_of(Path(self.directory, rest[0])) if rest else "")
        words = () if "wrap" in options else ("bash", *rest)
        envs = {**start.envs, **literal_variables(each for each in options.get("export", "").split(",") if "=" in each)}
        return [replace(each, envs=envs) for each in self._of_script(words, text, options)] if text else []

    def _image_of(self, file: str) -> str:
        """Return the image that apptainer runs from a file, which it names REPOSITORY_TAG.sif, or from an address."""
        image = file.removeprefix("docker://")
        name, _mark, tag = os.path.basename(image).removesuffix(".sif").partition("_")
        return next((f"{each.partition(':')[0]}:{tag}" for each in self.images if f"/{name}:" in f"{each}:"), image)

    def _script(
        self, words: tuple[str, ...], names: Sequence[str], shell: int
    ) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the words of a launcher of MPI before a script, and the script, or None if a command runs none."""
        if shell < len(words):
            return (), ("bash", "-c", *_shell_text(words[shell + 1 :]))
        for n in range(1, len(words)) if names[:1] and names[0] in _LAUNCHERS else ():
            if names_script(words[n:], self.directory):
                return words[:n] if names[0] in _MPI else (), words[n:]
        is_file = words[1:] or (words and names[0] not in SHELLS)
        return ((), words) if is_file and is_script(words, self.directory) else None

    def _traced(self, start: Start, before: tuple[str, ...], script: tuple[str, ...], depth: int) -> Iterator[Program]:
        """Yield the programs that a script starts, each after the words `before`."""
        job, script_of_start = dict(start.job), start.script or (() if before else script)
        if tasks := re.search(r" -{1,2}(?:np?|ntasks|nrs)[ =]?(\d+)", " ".join(before)):  # each task is a rank
            job |= dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"), tasks[1])
            job |= dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK"), "0")
        trace = partial(trace_script, script, self.directory, {**job, **start.envs}, unset=start.unset)
        try:
            records, failure = trace(elsewhere=1)
            more, _failure = trace(elsewhere=2) if failure else ((), "")
        except SpecError as error:
            raise SpecError(key="command", value=error.value, problem=error.problem, fix=error.fix) from None
        for record in (*records, *([None] if failure else []), *more[len(records) :]):
            if record is None:
                yield FailedScript(reason=failure, unset=start.unset)
                continue
            new = replace(start, words=(*before, *record.words), image="", script=script_of_start)
            new = replace(new, envs={**start.envs, **record.environment}, unset=record.unset)
            yield from self._inner(new, depth)


def _of_settings(words: Sequence[str], text: str) -> list[Start]:
    """Return the command that a file of settings belongs to; nothing for a text without a file, or another one."""
    rows = (row for row in read_table("untuned").values() if "starts" in row and re.search(row["text"], text, re.M))
    return [Start(words=(*row["starts"], words[-1])) for row in rows if words][:1]


def _with_files(start: Start, folder: Path) -> Start:
    """Return `start` with the path of a script of another machine or image replaced by the file here of that name."""
    words = list(start.words)
    for n, word in enumerate(words[:3]):
        if re.fullmatch(r"\S*/\S+\.(sh|bash)|\[?\S*/\S+\.sh", word) and not os.path.isfile(word):
            places = (folder, folder / "scripts", folder.parent, folder.parent / "scripts")
            words[n] = next(
                (str(each / Path(word).name) for each in places if os.path.isfile(each / Path(word).name)), word
            )
            if words[n] != word and os.path.basename(words[max(0, n - 1)]) not in SHELLS:
                words.insert(n, "bash")
                break
    return replace(start, words=tuple(words))


def _written(start: Start) -> Start:
    """Return the command that `printf %s COMMAND` writes to a file, which the script of NeMo-RL runs later."""
    if start.words[:2] == ("printf", "%s") and len(start.words) == 3:
        envs = {name: value for name, value in start.envs.items() if value != start.words[2]}
        with suppress(ValueError):  # other texts
            return replace(start, words=tuple(shlex.split(start.words[2])), envs=envs)
    return start


def _unwrapped(start: Start) -> Start:
    """Return `start` with the variables that its command sets first, and with python in front of `-m` of `uv run`."""
    words, envs = list(start.words), dict(start.envs)
    while words and (words[0] == "env" or _ASSIGNMENT.match(words[0])):
        name, equals, value = words.pop(0).partition("=")
        envs |= {name: value} if equals else {}
    if words[:2] == ["uv", "run"] and "-m" in words and not any(re.fullmatch(r"python[\d.]*", each) for each in words):
        words.insert(words.index("-m"), "python")
    return replace(start, words=tuple(words), envs=envs)


def _wrong_types(node: Any, path: str = "", name: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield path, value and rule of each value below `node`, which is at key `name`, of a type that cannot be read."""
    is_list, rule = isinstance(node, list), _("must be a mapping of keys and values")
    if name in _LISTS | _MAPPINGS and not isinstance(node, (Mapping, type(None))) and not (is_list and name in _LISTS):
        yield path, node, rule if name in _MAPPINGS else _("must be a list of mappings")
    for key, each in node.items() if isinstance(node, Mapping) else enumerate(node) if is_list else ():
        inner = f"{path}[{key}]" if is_list else f"{path}.{key}".lstrip(".")
        if is_list and name in _LISTS and not isinstance(each, (Mapping, type(None))):
            yield inner, each, rule
        yield from _wrong_types(each, inner, "" if is_list else str(key))


def _parts(words: Sequence[str], text: str, *, is_page: bool) -> list[tuple[Sequence[str], str]]:
    """Return the parts of a text that are read on their own, each with its command: manifests in a script, or blocks of
    Markdown in a page."""
    if manifests := _HERE_DOCUMENT.findall(text):
        return [(words, re.sub(r"\\(?=\$)", "", each[1] or each[3])) for each in manifests]
    blocks = _MARKDOWN.findall(text) if is_page else ()
    return [((), re.sub(r"(?m)^ *\$ ", "", each)) for each in blocks]


def _verb(names: Sequence[str]) -> int:
    """Return the position of the verb of a command that runs a container, or the number of words."""
    verbs = (n for n, name in enumerate(names) if name in ("run", "create"))
    return next((n for n in verbs if {*CONTAINERS} & {*names[max(0, n - 2) : n]}), len(names))


def _image_file(words: Sequence[str], names: Sequence[str]) -> int:
    """Return the position of the image that `apptainer run` starts, or the number of words."""
    files = (n for n, word in enumerate(words) if _IMAGE_FILE.search(word) and {*_APPTAINER} & {*names[:n]})
    return next((n for n in files if "run" in names[:n]), len(names))


def _shell(words: Sequence[str]) -> int:
    """Return the position of the shell that runs a text, or the number of words."""
    shells = (n for n, word in enumerate(words) if os.path.basename(word) in SHELLS)
    return next((n for n in shells if _shell_text(words[n + 1 :])), len(words))


def _shell_text(words: Sequence[str]) -> Sequence[str]:
    """Return the text of `-c` and the words that follow it, from the arguments of a shell; empty without `-c`."""
    count = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
    is_text = any(re.fullmatch(r"-\w*c", word) for word in words[:count]) and count < len(words)
    return [_readable(words[count]), *words[count + 1 :]] if is_text else ()


def _readable(text: str) -> str:
    """Return the text of a script with `[words]` for its placeholders, whole lines in place of broken ones, and blocks
    that write no file."""
    text = _BLOCK.sub(lambda m: f"{m[1]}> /dev/null", _BROKEN_LINE.sub("\\\n", text))
    return _PLACEHOLDER.sub(lambda m: "[" + "_".join(m[1].split()) + "]", text)
