"""The section `train.program` of a spec: the knobs of a user's program, and the patterns of its log."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field

from flagcore.domain.knob import Flag, Knob
from flagcore.domain.space import KnobValue
from flagcore.domain.units import Argument, Text, Word
from flagcore.errors import SpecError, join_errors
from flagcore.spec.plain_data import KeyPath, spec_error
from flagcore.spec.validate import Context, Section, located, rule, validated

Meaning = Literal[
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "zero_stage",
    "sequence_parallel",
    "recompute",
    "offload_optimizer",
]
"""What a knob means to the physics. Sizes are numbers of devices, samples or micro-batches.

`zero_stage` is what data-parallel ranks share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights.
`recompute` is 0 for none, 1 for the attention core only, and 2 for whole layers. The others are 0 or 1.
"""
MEANINGS: tuple[str, ...] = get_args(Meaning)
UNITS = ("at", "s", "ms", "samples_per_s", "tokens_per_s", "tokens_per_s_per_device")
"""The groups of a pattern that state the time of a step, or the time of the line."""
UNSET = "unset"
"""The value of a knob with `env` with which flagcore does not set the variable."""
OF_TRIAL = re.compile(r"FLAGCORE_.*|MASTER_(ADDR|PORT)|((LOCAL|NODE)_)?RANK|(LOCAL_)?WORLD_SIZE|\w+_VISIBLE_DEVICES")
"""Variables that flagcore sets for each trial."""
GROUPS = ("step", *UNITS, "loss", "gib")
LARGEST = {"zero_stage": 3, "recompute": 2, "sequence_parallel": 1, "offload_optimizer": 1}
"""The largest number of each meaning that is not a size."""
Format = Literal["megatron", "deepspeed", "torchtitan", "huggingface"]

Value: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31)] | bool | float | Word
Bytes = Annotated[int, Field(ge=0, le=8)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,99}$", examples=["micro_batch"])]
Number = Annotated[int, Field(ge=0, le=2**31)]


def _pattern_of(text: str, _context: Context) -> str:
    try:
        re.compile(text)
    except re.error as error:
        fix = "write a regular expression of Python"
        raise spec_error("", f"is not a regular expression: {error}", value=text, fix=fix) from None
    return text


Pattern = Annotated[Text, rule(_pattern_of)]


class KnobRow(Section):
    """A knob of the program."""

    values: Annotated[list[Value], Field(min_length=1)] | Annotated[dict[Word, Number], Field(min_length=1)]
    """Values to try; for a knob with a meaning also a mapping from each value to the number that it means."""
    flag: Text | None = None
    """Flag that sets the value, such as --tp; or a word with {}, such as tp={}; true passes a flag alone."""
    key: Text | None = None
    """Key of the configuration file that sets the value; dots separate the names of sections."""
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)] | None = None
    """Environment variable that sets the value; with the value unset, trials do not set it."""
    meaning: Meaning | None = None
    """What the knob means to the predictions; null: nothing, or the meaning with the knob's name."""
    default: Value | None = None
    """Value of the baseline; null: the value in `command` or in the configuration file, or else the first value."""
    printed: Pattern | None = None
    """Pattern of the log line with the value in use, in its first group; trials with other values are invalid."""
    label: Word | None = None
    """Short name for tables; null: the knob's name."""


class LogSection(Section):
    """How the log of the program is read."""

    format: Format | None = None
    """Program whose log lines are recognised; null: any of them."""
    step: Pattern | None = None
    """Pattern of a line per step. The group `step` is its number, and one of `s`, `ms`, `samples_per_s`,
    `tokens_per_s` and `tokens_per_s_per_device` is its time; without one, the arrival of the line counts. The groups
    `loss` and `gib` (memory) are optional."""
    loss: Pattern | None = None
    """Pattern of a line with a loss, in its first group."""
    memory_gib: Pattern | None = None
    """Pattern of a line with the peak of allocated memory in GiB, in its first group."""


class StateSection(Section):
    """Bytes of the model states per parameter in 16-bit and 8-bit training. In fp32, each of them has 4."""

    gradients: Bytes = 4
    """Bytes of a gradient."""
    main_weights: Bytes = 4
    """Bytes of the optimizer's own copy of a weight; 0: there is none."""
    moments: Bytes = 8
    """Bytes of both moments."""
    fused_adam: bool = False
    """Whether Adam is a kernel that works in place; otherwise an update needs 4 more bytes."""
    muon: bool = False
    """Whether DeepSpeed's Muon updates the matrices of layers; its momentum has the type of the weights."""


class ProgramSection(Section):
    """A training program that somebody else wrote."""

    knobs: Annotated[dict[Name, KnobRow], Field(min_length=1)]
    """Knobs of the program by name."""
    config: Text | None = None
    """Configuration file (JSON or YAML) relative to `directory`; trials get a changed copy in their folder."""
    fixed: Annotated[dict[Meaning, Number], Field(default={})]
    """Meanings that have the same number in all trials, such as zero_stage: 3."""
    trial_args: Annotated[list[Argument], Field(default=[])]
    """Arguments of trials only, such as --max-steps and {steps}, which stands for the number of steps."""
    trial_keys: Annotated[dict[Text, Any], Field(default={})]
    """Keys of the configuration file with their values in trials only, such as those that turn checkpoints off."""
    log: LogSection = LogSection()
    """How the log is read; absent: known formats are recognised."""
    state_bytes: StateSection = StateSection()
    """Bytes of the model states per parameter."""

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers in `fixed` by meaning."""
        return {str(meaning): number for meaning, number in self.fixed.items()}


def program_of(data: object) -> ProgramSection:
    """Return the section `train.program` of a spec. Raises SpecError with all problems."""
    section, problems = validated(ProgramSection, data, Context())
    problems += _problems(section) if section else ()
    if section is None or problems:
        raise join_errors([located(each, ("train", "program"), "") for each in problems])
    return section


def _problems(section: ProgramSection) -> Iterator[SpecError]:
    for name, row in section.knobs.items():
        yield from _row_problems(name, row, section)
    for meaning, number in section.fixed.items():
        if number > LARGEST.get(meaning, number):
            yield spec_error(("fixed", meaning), f"must be at most {LARGEST[meaning]}", value=number)
    meanings = [own for name, row in section.knobs.items() if (own := meaning_of(name, row))]
    for repeated in {each for each in meanings if meanings.count(each) + (each in section.fixed) > 1}:
        problem, fix = f"has several knobs with the meaning {repeated}", "give it to one knob, and not in `fixed`"
        yield spec_error("knobs", problem, fix=fix)
    variables = [row.env for row in section.knobs.values() if row.env]
    for name in sorted({each for each in variables if variables.count(each) > 1}):
        yield spec_error("knobs", f"has several knobs with env {name}", fix="make them one knob")
    yield from _step_problems(section.log.step or "")


def _step_problems(pattern: str) -> Iterator[SpecError]:
    """Yield the problems of the pattern of a line per step, whose groups flagcore must know."""
    groups = re.compile(pattern).groupindex.keys()
    if pattern and "step" not in groups:
        fix = r"write the number of the step as (?P<step>\d+): several ranks may print the same step"
        yield spec_error("log.step", "has no group `step`", value=pattern, fix=fix)
    if unknown := sorted(groups - {*GROUPS}):
        fix = f"use {', '.join(GROUPS)}, or a group without a name"
        yield spec_error("log.step", f"has the unknown group `{unknown[0]}`", value=pattern, fix=fix)
    if groups >= {"s", "ms"} and "|" not in pattern:
        problem, fix = "has the groups `s` and `ms`", "keep the one whose unit the program prints"
        yield spec_error("log.step", problem, value=pattern, fix=fix)


def _row_problems(name: str, row: KnobRow, program: ProgramSection) -> Iterator[SpecError]:
    at: KeyPath = ("knobs", name)
    if row.key and program.config is None:
        yield spec_error((*at, "key"), "needs a configuration file", value=row.key, fix="set `config`")
    if OF_TRIAL.fullmatch(row.env or ""):
        yield spec_error((*at, "env"), "is a variable that flagcore sets for each trial", value=row.env)
    if row.env and (odd := [each for each in values_of(row) if "\0" in str(each)]):
        yield spec_error((*at, "values"), "contain NUL, which no variable can", value=odd)
    if meaning := meaning_of(name, row):
        allowed, rule = range(1, 2**31 + 1), "a positive whole number"
        if meaning in LARGEST:
            allowed, rule = range(LARGEST[meaning] + 1), f"a number from 0 to {LARGEST[meaning]}"
        numbers = numbers_of(row).items()  # to find None, a range would look at all that it has
        if wrong := [value for value, number in numbers if number is None or number not in allowed]:
            fix = f"write what each value means, as in {wrong[0]}: {allowed[0]}"
            yield spec_error((*at, "values"), f"mean no {meaning}, which is {rule}", value=[*wrong], fix=fix)
    if row.default is not None and as_value(row, row.default) not in values_of(row):
        yield spec_error((*at, "default"), "is not one of `values`", value=row.default, fix="add it there")


def meaning_of(name: str, row: KnobRow) -> str | None:
    """Return the meaning of a knob. A knob without a meaning that has the name of one has that one."""
    return row.meaning or (name if name in MEANINGS else None)


def _is_word(row: KnobRow) -> bool:
    """Return whether the values of a knob are words: neither all switches nor all integers."""
    kinds = set() if isinstance(row.values, Mapping) else {type(each) for each in row.values}
    return kinds not in ({bool}, {int})


def as_value(row: KnobRow, value: object) -> KnobValue:
    """Return a value of the program as a value of the knob. Words, and numbers with a fraction, are text."""
    return _converted(value, is_word=_is_word(row))


def _converted(value: object, *, is_word: bool) -> KnobValue:
    if not is_word and isinstance(value, (bool, int)):
        return value
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value}"


def values_of(row: KnobRow) -> tuple[KnobValue, ...]:
    """Return the listed values of a knob, without duplicates."""
    is_word = _is_word(row)  # once, because a knob may have thousands of values
    return tuple(dict.fromkeys(_converted(each, is_word=is_word) for each in row.values))


def numbers_of(row: KnobRow) -> dict[KnobValue, int | None]:
    """Return the number that each value means. It is None for a word without a number."""
    if isinstance(row.values, Mapping):
        return {_converted(value, is_word=True): number for value, number in row.values.items()}
    return {value: None if isinstance(value, str) else int(value or 0) for value in values_of(row)}


def knob_of(name: str, row: KnobRow) -> Knob:
    """Return the knob that a row describes."""
    values = values_of(row)
    kind: Any = "word" if _is_word(row) else "flag" if isinstance(values[0], bool) else "int"
    meaning = meaning_of(name, row)
    default = values[0] if row.default is None else as_value(row, row.default)
    numbers = [int(each or 0) for each in values if not isinstance(each, str)]
    return Knob(
        name=name,
        label=row.label or "",
        help=f"A setting of the program, predicted as {meaning}."
        if meaning
        else "A setting of the program, not predicted.",
        kind=kind,
        words=tuple(str(each) for each in values) if kind == "word" else (),
        minimum=min([1, *numbers]),
        neutral=default,
        shows_neutral=True,
        layout=meaning in MEANINGS[:5],
        auto=lambda task: values,
        auto_help="the values in train.program",
        flags=(Flag(name=row.flag.lstrip("-")),) if row.flag else (),
        memory_order=1 if meaning == "micro_batch_size" else 0,
        answers="seeds",  # also data, which many programs divide by their layout
    )
