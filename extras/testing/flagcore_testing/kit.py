"""The plugin under test, and checks with their results."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flagcore_vendorkit.detection import DeviceDetector
from flagcore_vendorkit.engines import Maturity, Quirks, Variable, read_maturity, read_quirks, read_variables
from flagcore_vendorkit.fields import documents

from flagcore.contracts import KernelCosts
from flagcore.domain.chip import Chip
from flagcore.domain.cluster import NodeGroup
from flagcore.domain.engine import TaskAdvice
from flagcore.domain.spec import Task
from flagcore.domain.trial import TrialState
from flagcore.errors import SpecError
from flagcore.loading.entry_points import installed, one_line
from flagcore.plugins import ENGINES, GROUP, LoadedPlugins, load_plugins, names, validation
from flagcore.spec.plain_data import parse_yaml
from flagcore_testing.examples import task_on
from flagcore_testing.package import Package, Transcript, read_installed, read_transcripts, source_of
from flagcore_testing.places import line_of_error, place_of

T = TypeVar("T")


class Skip(Exception):
    """A check does not apply. The message gives the reason."""


def need(value: T | None, reason: str) -> T:
    """Return `value`. Raises Skip with the reason if it is None, false or empty."""
    if not value:
        raise Skip(reason)
    return value


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with its location (file and key, or hook), and the fix."""

    message: str
    fix: str


Case = tuple[object, str] | tuple[object, str, str]
"""A row of a table of rules: whether something is wrong, the message, and the fix if it is not that of the check."""
Problems = Iterable[Problem | str | Case]
Items = Iterable[tuple[Any, ...]]
"""What a check looks at, one by one: each item is the beginning of the messages, and the arguments of the check."""


def wrong(found: Problems, where: str = "", fix: str = "") -> Iterator[Problem]:
    """Yield a problem for each message, and for each case that is true. Messages begin with `where`, and have this
    `fix` if they have none of their own. Problems stay as they are."""
    for each in found:
        if isinstance(each, Problem):
            yield each
        elif isinstance(each, str):
            yield Problem(f"{where}{each}", fix)
        elif each[0]:
            yield Problem(f"{where}{each[1]}", (*each, fix)[2])


def repeated(words: Iterable[T]) -> Iterator[tuple[T, int]]:
    """Yield each word that is there several times, with its number."""
    return ((word, times) for word, times in Counter(words).items() if times > 1)


def fix_of(reason: str) -> str:
    """Return the fix for an error in a plugin's file, or an empty string for other errors."""
    if reason.startswith("SpecError"):
        return "correct that key; docs/plugin-data.md describes the files"
    missing_fix = "write that file (see docs/plugin-data.md), or return None from the hook"
    return missing_fix if reason.startswith("FileNotFoundError") else ""


SHAPES = ((1, 1), (1, 2), (1, 8), (4, 8))
"""Numbers of nodes, and of devices per node, with which hooks are called."""
once = lru_cache(maxsize=32)
"""Decorates a function of a plugin whose result several checks use."""


@dataclass(eq=False)
class Subject:
    """A plugin under test. `hooks` is the module or object of its entry point.

    `examples` are log lines with the state of the failed trial, in addition to those of `quirks.yaml`.
    """

    name: str
    hooks: object
    distribution: Distribution | None = None
    examples: Sequence[tuple[str, TrialState]] = ()
    engines: tuple[str, ...] = field(default_factory=lambda: names(ENGINES))
    """The names of the installed engines."""
    reported: set[str] = field(default_factory=set)
    """The invalid files that a check has already reported."""
    is_slow: bool = False
    """Whether a hook exceeded its time limit."""

    @classmethod
    def of(cls, hooks: object, examples: Sequence[tuple[str, TrialState]] = ()) -> Subject:
        """Return the subject for `hooks`. It has the name of the entry point if the plugin is installed or in its
        source folder."""
        subject = cls(name="plugin_under_test", hooks=hooks, examples=examples)
        for name, points in installed(GROUP).items():
            if points[0].value == subject.entry:
                return cls(name=name, hooks=hooks, distribution=points[0].dist, examples=examples)
        with suppress(Skip):
            subject.name = next(name for name, value in subject.packaged.points.items() if value == subject.entry)
        return subject

    @cached_property
    def loaded(self) -> LoadedPlugins:
        """The plugin with the core's validation of every answer."""
        return LoadedPlugins.of({self.name: self.hooks})

    @cached_property
    def chips(self) -> tuple[Chip, ...]:
        """The chips of the plugin. An add-on has none."""
        return self.loaded.chips()

    @cached_property
    def others(self) -> LoadedPlugins:
        """The other plugins that are installed."""
        return load_plugins({self.name} & {*names(GROUP)})

    @cached_property
    def entry(self) -> str:
        """The entry point of the plugin, MODULE or MODULE:OBJECT. It is empty for an object without a package."""
        if isinstance(self.hooks, ModuleType):
            return self.hooks.__name__
        package = str(getattr(self.hooks, "package", ""))
        modules = [each for name, each in sys.modules.items() if package and name.partition(".")[0] == package]
        names = (
            f"{each.__name__}:{name}" for each in modules for name, value in vars(each).items() if value is self.hooks
        )
        return next(names, "")

    @property
    def detector(self) -> DeviceDetector | None:
        """The plugin's detector, or None if it has none."""
        detector = getattr(self.hooks, "detector", None)
        return detector if isinstance(detector, DeviceDetector) else None

    @property
    def hooks_module(self) -> str:
        """The name of the module with the hooks. Raises Skip for an object without a package."""
        return need(self.entry, "the plugin is an object without a package").partition(":")[0]

    @property
    def package(self) -> str:
        """The name of the plugin's package. Raises Skip for an object without a package."""
        return self.hooks_module.partition(".")[0]

    @property
    def package_folder(self) -> Path:
        """The folder of the plugin's package. Raises Skip for an object without a package."""
        return Path(str(sys.modules[self.hooks_module].__file__)).parent

    @cached_property
    def packaged(self) -> Package:
        """The metadata of the plugin's distribution. Raises Skip if there is no distribution."""
        if source := source_of(self.package_folder.resolve(), self.hooks_module):
            return source
        return read_installed(need(self.distribution, "the plugin's distribution was not found"))

    @property
    def source(self) -> Path:
        """The source folder of the plugin. Raises Skip if only the installed package is available."""
        return need(self.packaged.folder, "only the installed package is available, not its source")

    @cached_property
    def transcripts(self) -> tuple[Transcript, ...]:
        """The transcripts of the vendor's tools. Raises Skip if there are none."""
        return need(read_transcripts(self.source), "tests/smi has no transcripts")

    @property
    def listings(self) -> tuple[Transcript, ...]:
        """The transcripts that list devices, each with its tool. Raises Skip if there are none."""
        with_devices = tuple(each for each in self.transcripts if each.tool and each.devices)
        return need(with_devices, "no transcript in tests/smi lists devices")

    def shipped(self, file: str, read: Callable[[str], T]) -> T:
        """Return the content of a file of the plugin's package. Raises Skip if it does not exist, and SpecError if it
        is invalid."""
        need((self.package_folder / file).is_file(), f"the plugin has no {file}")
        return read(self.package)

    @property
    def quirks(self) -> Quirks:
        """The content of `quirks.yaml`."""
        return self.shipped("quirks.yaml", read_quirks)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The content of `environment.yaml`."""
        return self.shipped("environment.yaml", read_variables)

    @property
    def maturity(self) -> Maturity:
        """The content of `maturity.yaml`."""
        return self.shipped("maturity.yaml", read_maturity) or Maturity()

    @cached_property
    def words(self) -> Counter[str]:
        """How often each word occurs in the plugin's files and its README."""
        package, words = self.package_folder, r"[A-Za-z_]\w+"
        texts = [path.read_text("utf-8", "replace") for path in package.rglob("*") if path.suffix in (".py", ".yaml")]
        return Counter(word for text in [*texts, self.packaged.readme] for word in re.findall(words, text))

    def yaml_files(self, pattern: str) -> Iterator[tuple[str, Any]]:
        """Yield the name and the content of each document of the YAML files of the plugin's package that match."""
        for path in sorted(self.package_folder.glob(pattern)):
            name = path.relative_to(self.package_folder).as_posix()
            with suppress(SpecError, UnicodeDecodeError):  # another check reports it
                for each, text in documents(path.read_text("utf-8"), name):
                    yield each, parse_yaml(text, file=path.name)

    def is_reported(self, reason: str) -> bool:
        """Return whether a check has already reported an invalid file, and record the report."""
        is_known = reason in self.reported
        self.reported.add(reason)
        return is_known

    def failed(self, *hooks: str) -> bool:
        """Return whether a call of `hooks` has failed so far."""
        return any(failure.hook in hooks for failure in self.loaded.failures)

    def problems_of(self, *hooks: str) -> Iterator[Problem]:
        """Yield the failures of `hooks` so far. Raises Skip for an invalid file that a check has already reported."""
        for failure in self.loaded.failures:
            if failure.hook in hooks:
                if failure.reason.startswith("SpecError") and self.is_reported(failure.reason):
                    raise Skip(f"{failure.reason.split(': ')[1]} cannot be read")
                fix = fix_of(failure.reason) or f"see {failure.hook} in docs/hooks.md for its answer"
                yield Problem(f"{failure.hook}: {failure.reason}", fix=fix)

    def places(self, messages: Iterable[str], error: BaseException | None = None) -> str:
        """Return the lines that an error or messages are about, separated by commas, or an empty string if unknown."""
        folders: list[Path] = []
        with suppress(Skip, KeyError):
            folders.append(self.package_folder)
            folders.append(self.source)
        found = (line_of_error(error, folders) or place_of(message, folders) for message in messages)
        return ", ".join(dict.fromkeys(filter(None, found)))

    def ask(self, hook: str, arguments: Mapping[str, object]) -> object:
        """Return the plugin's answer without validation. Raises the plugin's exceptions."""
        return self.loaded.plugins[0].call(hook, arguments)

    def own_chips(self) -> tuple[Chip, ...]:
        """Return the chips of the plugin. Raises Skip if it has no readable chip."""
        chips = self.chips
        return need(chips, "its chips cannot be read" if self.failed("flagcore_chips") else "the plugin has no chips")

    def each(self, hook: str, answer: Callable[[Chip], object]) -> Items:
        """Return the plugin's answers for its chips, for checks. Raises Skip if there are none."""
        answers = [(f"{chip.name}: ", self, chip, answer(chip)) for chip in self.own_chips()]
        found = [each for each in answers if each[3] is not None]
        return need(found, f"{hook} returns None for all chips: the core's default is used")

    def own_costs(self) -> Items:
        """Return the plugin's own kernel times, without the core's roofline for missing times. Raises Skip if there are
        none."""

        def own(chip: Chip) -> KernelCosts | None:
            if self.loaded.kernel_costs(chip, "megatron") is None:
                return None  # nothing, or an invalid answer, which another check reports
            about = {"chip": chip, "engine": "megatron", "kind": "train"}
            return validation.kernel_costs(self.ask("flagcore_kernel_costs", about))

        return self.each("flagcore_kernel_costs", own)

    @cached_property
    def advice(self) -> list[tuple[Chip, str, TaskAdvice]]:
        """The advice on a small task for each chip and engine. Raises Skip if there are no chips."""
        return [(*pair, self.loaded.check_task(task_on(*pair))) for pair in self.pairs()]

    def pairs(self) -> list[tuple[Chip, str]]:
        """Return each chip with each engine. Raises Skip if there are no chips."""
        return [(chip, engine) for chip in self.own_chips() for engine in self.engines]

    def groups(self) -> Iterator[NodeGroup]:
        """Yield each chip in node groups of several sizes."""
        for chip in self.own_chips():
            shapes = dict.fromkeys([*SHAPES, (1, chip.devices_per_node), (2, chip.devices_per_node)])
            yield from (NodeGroup(chip=chip, nodes=nodes, devices_per_node=devices) for nodes, devices in shapes)

    def tasks(self) -> Iterator[Task]:
        """Yield a small task for each chip and engine, training tasks first."""
        pairs = sorted(self.pairs(), key=lambda pair: pair[1] != "megatron")
        return (task_on(chip, engine) for chip, engine in pairs)

    def implements(self, hook: str) -> None:
        """Raise Skip if the plugin does not implement `hook`."""
        need(hook in self.loaded.plugins[0].hooks, f"the plugin does not implement {hook}")


MAX_LISTED = 3
"""Maximum number of problems in the message of a check; the others are counted."""

Check = Callable[[Subject], Iterator[Problem]]
"""A function that yields violations, or raises Skip. Its name is a sentence that is true for a valid plugin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one check: `state` is passed, failed or skipped. For a skip, `message` is the reason.

    `places` are the lines of the problems, such as `flagcore_acme/chips/a1.yaml:12`, separated by commas.
    """

    check: str
    state: str
    message: str = ""
    fix: str = ""
    places: str = ""


def whole(plugin: Subject) -> Items:
    """Check the plugin as a whole."""
    return [("", plugin)]


def chips(plugin: Subject) -> Items:
    """Check each chip of the plugin. Raises Skip if there are no chips."""
    return [(f"{chip.name}: ", chip) for chip in plugin.own_chips()]


def linked(plugin: Subject) -> Items:
    """Check the link of each chip that has one. Raises Skip if there are no chips."""
    return [(f"{chip.name}: ", chip, chip.link) for chip in plugin.own_chips() if chip.link]


def check(
    fix: str = "", *, each: Callable[[Subject], Items] = whole, hook: str = ""
) -> Callable[[Callable[..., Problems]], Check]:
    """Return a decorator that turns a function into a check. The function returns messages and cases, which get this
    `fix`, or problems.

    The function is called for every item of `each(plugin)`. The check is skipped without the hook `flagcore_{hook}`.
    """

    def decorate(function: Callable[..., Problems]) -> Check:
        @wraps(function)
        def checked(plugin: Subject) -> Iterator[Problem]:
            if hook:
                plugin.implements(f"flagcore_{hook}")
            for where, *arguments in each(plugin):
                yield from wrong(function(*arguments), where, fix)

        return checked

    return decorate


LOADS, SLOW = "plugin_loads", "hooks_return_quickly"
"""Checks after whose failure the others need not run, or would take minutes."""


def run(check: Check, subject: Subject) -> Result:
    """Return the result of `check` for `subject`. After a failure of LOADS or SLOW, others are skipped.

    An exception of the plugin is a failure of the check.
    """
    name, failure = check.__name__, None
    is_late = subject.is_slow and name not in (LOADS, SLOW)
    if is_late or (name != LOADS and not subject.loaded.plugins):
        reason = "the plugin does not load" if not subject.loaded.plugins else "a hook takes too long"
        return Result(check=name, state="skipped", message=reason)
    problems: list[Problem] = []
    try:
        problems += check(subject)
    except Skip as skip:
        if not problems:
            return Result(check=name, state="skipped", message=str(skip))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure, reason = error, one_line(error)
        if isinstance(error, SpecError) and subject.is_reported(reason):
            return Result(check=name, state="skipped", message=f"{error.file or 'a file'} cannot be read")
        fix = fix_of(reason) or "the plugin raised this error: correct it, or return None for unknown values"
        problems = [Problem(reason, fix)]
    if not problems:
        return Result(check=name, state="passed")
    subject.is_slow |= name == SLOW
    messages = list(dict.fromkeys(problem.message for problem in problems))
    listed, remainder = messages[:MAX_LISTED], len(messages) - MAX_LISTED
    return Result(
        check=name,
        state="failed",
        message="; ".join([*listed, *([f"and {remainder} more"] if remainder > 0 else [])]),
        fix="; ".join(dict.fromkeys(problem.fix for problem in problems if problem.message in listed)),
        places=subject.places(listed, failure),
    )
