"""The program of an engine: `engine.yaml`, the spec's `engine_args`, the installed version, and the command line."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import yaml
from flagcore_importers import programs
from flagcore_importers.programs import strip_dashes
from flagcore_vendorkit.settings import Settings, read_settings

from flagcore.domain.engine import Unmodelled
from flagcore.domain.knob import Flag, Knob, in_versions
from flagcore.domain.space import BoolArray, Columns, FloatArray, IntArray, KnobValue
from flagcore.domain.spec import Spec, Task
from flagcore.errors import NoDevice, SpecError, join_errors
from flagcore.i18n import closest
from flagcore.spec.plain_data import SafeLoader, package_yaml
from flagcore_serving.job import SCHEMES, EngineArg
from flagcore_serving.space import knobs
from flagcore_serving.space.knobs import Auto, FlagProblem, flags_in_source, forms, leaves, similar
from flagcore_serving.space.weights import check_directory

RESERVED_FLAGS: Mapping[str, str] = package_yaml(__package__, "reserved.yaml")


class EngineArgs(NamedTuple):
    """The `engine_args` of a spec. `fixed`: the values of knobs, for all candidates. `others`: all other flags."""

    fixed: dict[str, KnobValue]
    others: dict[str, EngineArg]


P = TypeVar("P", bound="Program")


@dataclass(frozen=True, kw_only=True)
class Program:
    """An engine's command, flags, knobs and overheads.

    - `program`: the command that starts the engine by default.
    - `commands`: all commands with which users may start it.
    - `model_flags`: flags for the model, which may also follow the command without a flag.
    - `images`: the entry points of public container images (see `Engine.images`).
    - `published`: the image of a release for the chips of a vendor, by the vendor's name.
    - `in_image`: the path of the program in these images. Empty if it is on the PATH.
    - `config_flag`, `file_variable`: the flag of a YAML file with more flags, or the variable with its path.
    - `typed_file`: whether such a file has sections, whose keys follow a dot in flags, and false is a value.
    - `set_flag`: the flag of a word FLAG=VALUE.
    - `local_flag`: the flag of the data-parallel ranks on each host.
    - `short_flags`: flags of one dash that are not flags of a knob, with their long names. A name with a dot at its end
      applies only to a flag with a key after a dot.
    - `roles`: patterns of the arguments of servers that only prefill or only decode, by `prefill` and `decode`.
      `role_flags`: a pattern of the flags of such servers that each trial sets itself.
    - `env_prefix`, `env_flags`: the start of variables that stand for flags, and the flags of some that differ in name.
    - `stored`: the precision of stored weights by values of the quantization that do not name it.
    - `digit_flags`: flags of one letter that a digit may follow without a space, as in `-O3`.
    - `units`: the factors of the letters that may follow a number in LENGTHS, such as 1000 of `k`.
    - `abbreviations`: whether the engine accepts the unique start of a long flag, as argparse does by default.
    - `share_flag`: the flag with a share of the model for each device, separated by commas.
    - `offload_flag`: the flag with the GiB of a device's weights that stay in the memory of the host.
    - `text_only_flag`: the flag that leaves out the vision tower.
    - `exchanges`: by vendor of the chips, the values of EXCHANGE of published runs with experts on several hosts: of
      instances that prefill, and of others. None: the vendor's build has an exchange of its own.
    - `expert_switch`: the flag of expert parallelism if it takes no value.
    - `packages`: pip packages that may install the engine.
    - `releases`: a PEP 440 specifier of the known releases; empty if knobs do not depend on the release.
    - `reserved`: flags that the user cannot set, each with the reason.
    - `flag_files`, `flag_fields`: files of the engine's source that contain its flags as literals, or as fields of a
      class. Flags are not checked if both are empty.
    - `package`: the engine's package, which has a `settings.yaml`. Without one, all flags and variables are unknown.
    - `removed`: by release, the flags that it no longer has, each with its successor or an empty string. The release is
      empty if it is not known.
    - `moved`: by knob, the words that a package of its own has since a release: this release, and the package.
    - `overheads`: fields of `Overheads` (model/work.py), by the first release to which they apply, the newest first.
    - `block_sizes`: supported block sizes, by attention backend.
    - `cache_types`: bytes per cached element, by word of the knob for the cache type.
    - `word_releases`: by knob, the words that only some releases accept, with a specifier of these releases as the key.
    - `defaults`: the engine's own values of knobs that are not set.
    - `schemes`: the scheme of speculation (job.SCHEMES) of words of its knob. `draft_flag`: the flag of a draft model.
    - `forbidden`: combinations of values that the engine rejects, by name of the rule (see `rules.forbidden`).
    - `by_knob`, `by_flag`: knobs by name, and by the names of their flags.
    """

    title: str
    program: Sequence[str]
    knobs: tuple[Knob, ...]
    commands: Sequence[Sequence[str]] = ()
    model_flags: Sequence[str] = ()
    images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)
    in_image: str = ""
    config_flag: str = ""
    file_variable: str = ""
    typed_file: bool = False
    set_flag: str = ""
    local_flag: str = ""
    roles: Mapping[str, str] = field(default_factory=dict)
    role_flags: str = ""
    short_flags: Mapping[str, str] = field(default_factory=dict)
    env_prefix: str = ""
    env_flags: Mapping[str, str] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    digit_flags: str = ""
    units: Mapping[str, int] = field(default_factory=dict)
    abbreviations: bool = False
    share_flag: str = ""
    offload_flag: str = ""
    text_only_flag: str = ""
    exchanges: Mapping[str, Sequence[str] | None] = field(default_factory=dict)
    expert_switch: str = ""
    packages: Sequence[str] = ()
    releases: str = ""
    package: str = ""
    reserved: Mapping[str, str] = field(default_factory=lambda: RESERVED_FLAGS)
    flag_files: Sequence[str] = ()
    flag_fields: Sequence[str] = ()
    removed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    moved: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    overheads: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    block_sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cache_types: Mapping[str, float] = field(default_factory=dict)
    word_releases: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    defaults: Mapping[str, KnobValue] = field(default_factory=dict)
    schemes: Mapping[str, str] = field(default_factory=dict)
    draft_flag: str = ""
    forbidden: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by_knob: dict[str, Knob] = field(default_factory=dict, init=False)
    by_flag: dict[str, list[tuple[Knob, Flag]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for knob in self.knobs:
            self.by_knob[knob.name] = knob
            for flag in knob.flags:
                for name in {strip_dashes(flag.name), strip_dashes(flag.off)}:
                    self.by_flag.setdefault(name, []).append((knob, flag))

    @classmethod
    def read(cls: type[P], package: str, autos: Mapping[str, Auto] | None = None) -> P:
        """Read the program from `engine.yaml` and `settings.yaml` in an engine's package. The keys are the fields.

        Each knob in `knobs` may also contain `default`, the engine's own value, and `word_releases`. `autos`: meanings
        of `auto` that only this engine has, by the names with which its knobs refer to them.
        """
        data = yaml.load(files(package).joinpath("engine.yaml").read_text("utf-8"), SafeLoader)
        knob_rows = {name: row or {} for name, row in data.pop("knobs").items()}
        knob_rows[knobs.KV]["words"] = list(data["cache_types"])
        releases = {name: row.pop("word_releases") for name, row in knob_rows.items() if "word_releases" in row}
        defaults = {name: row.pop("default") for name, row in knob_rows.items() if "default" in row}
        reserved = RESERVED_FLAGS | data.pop("reserved")
        table = knobs.read(knob_rows, {**knobs.AUTOS, **(autos or {})})
        return cls(
            knobs=table,
            word_releases=releases,
            defaults=defaults,
            reserved=reserved,
            package=package,
            **data,
        )

    @property
    def settings(self) -> Settings:
        """The classes of flags and environment variables, from `settings.yaml`, which many plans do not need."""
        return read_settings(self.package) if self.package else Settings()

    @cached_property
    def flags(self) -> frozenset[str]:
        """All flags of the newest known release; empty if they are not known."""
        flags = {name for name in self.settings.names if name == name.lower()}
        if flags:
            of_knobs = {
                strip_dashes(word) for knob in self.knobs for flag in knob.flags for word in (flag.name, flag.off)
            }
            names = {knob.name.replace("_", "-") for knob in self.knobs}
            flags |= {*of_knobs, *names, *self.reserved, *self.digit_flags, *self.model_flags}
            flags -= {"", *chain.from_iterable(self.removed.values())}
        return frozenset(flags)

    @cached_property
    def known(self) -> frozenset[str]:
        """The flags of all known releases."""
        return self.flags.union(*self.removed.values())

    def code(self, name: str, value: KnobValue) -> int:
        """Return the integer that represents a value in the column of the knob `name`."""
        return knobs.code(next(knob for knob in self.knobs if knob.name == name), value)

    def _words(self, name: str) -> tuple[str, ...]:
        return next(knob.words for knob in self.knobs if knob.name == name)

    def values(self, columns: Columns, name: str) -> IntArray:
        """Return the column of the knob `name`, with the engine's default where it is not set."""
        return knobs.or_default(columns[name], self.code(name, self.defaults[name]))

    def element_bytes(self, columns: Columns) -> FloatArray:
        """Return the bytes per element of the KV cache: 2 where its type is not set."""
        return np.array([2.0, *self.cache_types.values()])[columns[knobs.KV]]

    def schemes_of(self, spec: Spec) -> Mapping[str, str]:
        """Return `schemes` for a spec, whose model may have layers that a method uses."""
        return self.schemes

    def scheme(self, task: Task, columns: Columns) -> IntArray:
        """Return `Settings.scheme` of each candidate."""
        words, schemes = self._words(knobs.SPECULATION), self.schemes_of(task.spec)
        names = [schemes.get(word, "") for word in words]
        return np.array([0, *(1 + SCHEMES.index(name) if name else 0 for name in names)])[columns[knobs.SPECULATION]]

    def converts_to_fp8(self, columns: Columns) -> BoolArray:
        """Return a mask of the candidates for which the engine converts the weights to fp8."""
        words = self._words(knobs.QUANTIZATION)
        return np.isin(columns[knobs.QUANTIZATION], [code for code, word in enumerate(words, 1) if "fp8" in word])

    def parse(self, spec: Spec) -> EngineArgs:
        """Return the knobs that `engine_args` fix, and the other flags. Raises SpecError for invalid ones."""
        engine_args = self.split(spec)
        if engine_args.others:
            self.check(engine_args.others, self.flags_of(spec), self.version(spec))
        return engine_args

    def flags_of(self, spec: Spec) -> Collection[str]:
        """Return the flags of the engine that a spec's command starts. It is empty if they are not known."""
        try:
            return self.installed_flags(self.command(spec))
        except NoDevice:
            return ()

    def split(self, spec: Spec) -> EngineArgs:
        """Parse `engine_args` and `kept` as `parse` does, without checking the other flags. A key is the name or a flag
        of a knob."""
        version = self.version(spec) if spec.serve.engine_args else ""
        kept = self.kept(spec.baseline, spec.space) if spec.baseline else {}
        kept = {name: self.by_knob[name].parse(each, f"auto_tuner.baseline.{name}") for name, each in kept.items()}
        args = self.divided(self.known_args(spec.serve.engine_args), version, "serve.engine_args.")
        return EngineArgs(kept | args.fixed, args.others)

    def kept(self, baseline: Mapping[str, Any], space: Iterable[str]) -> dict[str, Any]:
        """Return the values that all candidates keep: not layouts, limits of the batch, and knobs in the space."""
        searched = {*knobs.DEFAULT_SPACE, *space}
        others = [each for each in self.knobs if not each.layout and searched.isdisjoint(each.names)]
        return {each.name: value for each in others if (value := each.value_in(baseline)) is not None}

    def divided(self, args: Mapping[str, EngineArg], version: str, prefix: str) -> EngineArgs:
        """Divide flags into knobs and others. `prefix` starts the keys of errors. Raises SpecError."""
        engine_args, problems = EngineArgs({}, {}), list[SpecError]()
        for key, value in args.items():
            name = self.full_name(strip_dashes(key))
            knob, flag = self.knob_of(name, version)
            if knob is None:
                engine_args.others[name] = value
            elif flag is not None and name == flag.off and isinstance(value, bool):
                engine_args.fixed[knob.name] = not value
            elif flag is not None and flag.word and value is True:
                engine_args.fixed[knob.name] = flag.word
            else:
                try:
                    engine_args.fixed[knob.name] = knob.parse(value, f"{prefix}{key}")
                except SpecError as error:
                    if knob.name in knobs.EXTENSIBLE and isinstance(value, str):
                        engine_args.others[name] = value
                    else:
                        problems.append(error)
        if problems:
            raise join_errors(problems)
        return engine_args

    def known_args(self, args: Mapping[str, EngineArg]) -> dict[str, EngineArg]:
        """Return `args` with knobs in place of flags that set a knob only in combination; by default unchanged."""
        return dict(args)

    def full_name(self, name: str) -> str:
        """Return the long name of a short flag, both without dashes. Other names are returned unchanged."""
        head, dot, tail = name.partition(".")
        return (self.short_flags.get(head + dot) or self.short_flags.get(head, head)) + dot + tail

    def knob_of(self, name: str, version: str | None = None) -> tuple[Knob | None, Flag | None]:
        """Return the knob with this name or flag (without dashes), and the flag.

        The flag is None if the knob's name matches. Both are None if nothing matches. `version`: the release, which
        matters for a flag that sets different knobs in different releases.
        """
        if own := self.by_knob.get(name.replace("-", "_")):
            return own, None
        same_name = self.by_flag.get(name, ())
        return next(
            (pair for pair in same_name if pair[0].is_available(version) and in_versions(pair[1].versions, version)),
            (*same_name, (None, None))[0],
        )

    def check(self, names: Iterable[str], installed_flags: Collection[str], version: str) -> None:
        """Raise SpecError for flags that are reserved, or that the release does not have.

        `installed_flags`: the flags of the installed release; empty if they are not known.
        """
        problems: list[SpecError] = []
        for name in names:
            key, positive = f"serve.engine_args.{name}", name.removeprefix("no-").split(".")[0]
            if reason := self.reserved.get(name) or self.reserved.get(positive):
                problems.append(SpecError(key=key, problem=f"is set by flagcore: {reason}", fix="remove it"))
            elif (found := self.flag_problem(name, installed_flags, version)) and found.is_certain:
                problems.append(SpecError(key=key, problem=found.problem, fix=found.fix))
        if problems:
            raise join_errors(problems)

    def flag_problem(self, name: str, installed_flags: Collection[str], version: str) -> FlagProblem | None:
        """Return why the engine may reject a flag that sets no knob, or None if it accepts it, or if that is unknown.

        `installed_flags`: as in `check`. They have priority over the known flags. A release that is newer than the
        known ones may have more flags than these.
        """
        is_known = self.knows_flag(name)
        if not forms(name).isdisjoint(installed_flags):
            return None
        if is_known and (found := self._removal(name, version, is_installed=bool(installed_flags))):
            return found
        alias = name.replace("-", "_")
        known = (knob for knob in self.knobs if alias in knob.aliases)
        named = next((strip_dashes(knob.flags[0].name) if knob.flags else knob.name for knob in known), "")
        if installed_flags:
            close = named or closest(name, sorted(installed_flags))
            problem = f"is not a flag of the installed {self.title}"
            return FlagProblem(problem, f"did you mean {close}?" if close else "remove it")
        is_unknown = bool(self.flags) and not is_known and in_versions(self.releases, version)
        close = (named or similar(name, self.flags)) if is_unknown else ""
        return FlagProblem(f"is not a flag of {self.title}", f"did you mean {close}?") if close else None

    def _removal(self, name: str, version: str, *, is_installed: bool) -> FlagProblem | None:
        for since, flags in self.removed.items():
            removed = next((each for each in forms(name) if each in flags), None)
            if removed is not None and (not since or in_versions(f">={since}", version)):
                is_certain = is_installed or (bool(since) and programs.release(version) is not None)
                fix = f"use {flags[removed]}" if flags[removed] else "remove it"
                problem = f"was removed in {self.title} {since}".rstrip()
                return FlagProblem(problem, fix, removed=True, is_certain=is_certain)
        return None

    def needed_package(self, name: str, value: object, version: str) -> str:
        """Return what a value of the knob `name` needs beside the engine in this release, or an empty text."""
        since, package = self.moved.get(name, {}).get(str(value), ("", ""))
        is_moved = bool(package) and in_versions(f">={since}", version)
        return f"{value} needs the package {package} since {self.title} {since}" if is_moved else ""

    def knows_flag(self, name: str) -> bool:
        """Return whether a known release has a flag, which may be negated or have a key after a dot."""
        return bool(forms(name) & self.known)

    def unabbreviated(self, name: str, version: str) -> str:
        """Return the long flag of which `name` is the unique start, if the engine accepts such starts; else `name`."""
        if not self.abbreviations or self.knows_flag(name) or not in_versions(self.releases, version):
            return name
        longer = [each for each in self.known if each.startswith(name)]
        flags = (knob.flags if (knob := self.knob_of(each)[0]) else () for each in longer)
        meant = {
            strip_dashes(own[0].name) if own and own[0].name else each for each, own in zip(longer, flags, strict=True)
        }
        return meant.pop() if len(meant) == 1 else name

    def installed_flags(self, command: Sequence[str]) -> Collection[str]:
        """Return the flags of the engine that a command with an absolute path starts, without dashes.

        The result is empty if they are not known.
        """
        return self.flags_in(programs.package_folders(command[0]))

    def flags_in(self, folders: tuple[str, ...]) -> Collection[str]:
        """Return the flags of the engine's source in the first of `folders` that has it, without dashes."""
        return flags_in_source(folders, tuple(self.flag_files), tuple(self.flag_fields))

    def installed_release(self) -> tuple[Collection[str], str]:
        """Return the flags and the version of the engine that `program` starts. Both are empty if unknown."""
        path = programs.find_program(self.program[0]) if self.program else None
        return (self.installed_flags([path]), programs.package_version(path, *self.packages)) if path else ((), "")

    def columns(self, task: Task, columns: Columns) -> dict[str, IntArray]:
        """Return a column for each knob.

        A missing column is filled with the value that `engine_args` fix, or else with the neutral value.
        """
        fixed, shape = self.parse(task.spec).fixed, next(iter(columns.values()), np.zeros(1)).shape
        missing = {knob.name: knob for knob in self.knobs if knob.name not in columns}
        values = {name: knobs.code(knob, fixed.get(name, knob.neutral)) for name, knob in missing.items()}
        return {**columns, **{name: np.full(shape, code) for name, code in values.items()}}

    def command(self, spec: Spec) -> tuple[str, ...]:
        """Return the command that starts the engine, with an absolute path. Raises NoDevice if it does not exist."""
        return programs.find_command(spec, tuple(self.program), *self.packages[:1])

    def start_command(self, spec: Spec) -> tuple[str, ...]:
        """Return the command that starts the engine, with an absolute path if it exists here.

        The path is that of the target for a command that is for another machine.
        """
        if spec.serve.elsewhere:
            command = tuple(spec.serve.command or self.program or self.commands[0])
            if spec.serve.elsewhere == "host":
                return command
            return (self.in_image if self.in_image and not spec.serve.command else Path(command[0]).name, *command[1:])
        try:
            return self.command(spec)
        except NoDevice:
            return tuple(spec.serve.command or self.program)

    def version(self, spec: Spec) -> str:
        """Return the engine version in the spec, or else the version of the installed package; empty if unknown."""
        if spec.work.engine_version:
            return spec.work.engine_version
        try:
            return programs.package_version(self.command(spec)[0], *self.packages)
        except NoDevice:
            return ""

    def unmodelled(self, spec: Spec) -> Iterator[Unmodelled]:
        """Yield the flags and variables of a spec that change its cost, and that predictions do not include.

        They are other flags than those of knobs, and fixed values of knobs that are listed in `settings`.
        """
        args = self.split(spec)
        for name, value in {**args.others, **args.fixed}.items():
            yield from self.effects(name, value, f"serve.engine_args.{name}")
        if self.text_only(spec):
            yield Unmodelled(name="model.vision_config", why="")  # the vision tower is not loaded
        if any(spec.variables):
            yield from self.settings.of_environment(spec)

    def text_only(self, spec: Spec) -> bool:
        """Return whether the flags of a spec leave out the vision tower."""
        return bool(self.text_only_flag and self.split(spec).others.get(self.text_only_flag))

    def effects(self, name: str, value: object, shown: str) -> Iterator[Unmodelled]:
        """Yield the effects of a flag or a knob's value that predictions do not include, with the name `shown`.

        A knob whose values are all predicted is not listed in `settings`. A JSON object has an effect for each value.
        """
        (knob, flag), name = self.knob_of(name), name.replace("_", "-")
        if knob is not None and flag is None and name not in self.settings.names:
            return
        found = (self.settings.unmodelled(key, each, shown) for key, each in leaves(name, value))
        yield from dict.fromkeys(filter(None, found))

    def offloaded_bytes(self, spec: Spec) -> float:
        """Return the bytes of each device's weights that the spec's flags leave in the memory of the host."""
        gib = self.split(spec).others.get(self.offload_flag) if self.offload_flag else None
        return float(gib) * 2.0**30 if isinstance(gib, int | float) else 0.0

    def prefetched_share(self, spec: Spec, pipeline: IntArray) -> FloatArray:
        """Return the share of layers on the host: the last ones of each group, less those for which there are buffers.

        0 if only named parameters are there. Source: vLLM 0.32 `model_executor/offloader/prefetch.py`, adapted from
        SGLang's `utils/offloader.py`.
        """
        given = self.split(spec).others
        names = ("offload-group-size", "offload-num-in-group", "offload-prefetch-step")
        sizes = [given.get(name, 1 if at else 0) for at, name in enumerate(names)]
        group, number, step = (each if isinstance(each, int) and each > 0 else 0 for each in sizes)
        uses_other = given.get("offload-backend", "prefetch") == "uva" or given.get("offload-params")
        layers = np.ceil(spec.model.num_layers / pipeline.clip(1))
        if not group or number > group or uses_other:
            return np.zeros_like(layers)
        on_host = np.floor(layers / group) * number + np.maximum(layers % group - (group - number), 0.0)
        return np.asarray(np.maximum(on_host - step, 0.0) / layers)

    def unclassed(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are no knobs, and that have no class. A flag may be negated."""
        known = {*self.reserved, *self.model_flags, *self.short_flags, *self.digit_flags, "config", "help"}
        others = [name for name in names if not {name, name.removeprefix("no-")} & known]
        return self.settings.unclassed(name for name in others if self.knob_of(name)[0] is None)

    def ready(self, spec: Spec) -> None:
        """Raise SpecError or NoDevice if no server can be started with the spec's Hugging Face directory."""
        check_directory(spec)
        command = self.command(spec)
        version = programs.package_version(command[0], *self.packages)
        programs.check_version(spec, version)
        if spec.serve.command is None and "-m" in command and not version:
            fix = f"install {self.packages[0]} there, or set serve.command"
            raise NoDevice(f"{self.title} is not installed for {command[0]}; {fix}")
        self.parse(spec)
