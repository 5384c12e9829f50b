"""Checks of what the plugin states about engines: support, rules about values, advice, and knobs."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from flagcore_vendorkit.engines import all_knobs, read_quirks, read_variables
from flagcore_vendorkit.fields import Scope
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from flagcore.domain.chip import Support
from flagcore.domain.engine import JOB_KEYS, SHARED_PREFIXES, EngineSupport, ForcedSetting, RefusedValues, ValueRule
from flagcore.domain.knob import ANSWERS, WHOLE_STEP, Factor, Knob
from flagcore.domain.prediction import PART_NAMES
from flagcore.domain.spec import PRECISIONS
from flagcore.errors import SpecError
from flagcore.plugins import ENGINES, find_engine, kind_of, names
from flagcore_testing.examples import task_on
from flagcore_testing.kit import Case, Items, Problems, Subject, check, need, repeated, wrong

IMPLEMENTATIONS = ("local", "transformer_engine")
"""Implementations of the layers that a spec may name."""
PREFIXES = ", ".join(SHARED_PREFIXES)


def _supports(plugin: Subject) -> Items:
    """Return, for each chip and engine: the beginning of messages, the engine and the answer."""
    answers = [
        (f"flagcore_engine_support: {engine} on {chip.name}", engine, answer)
        for chip, engine in plugin.pairs()
        if not (answer := plugin.loaded.engine_support(chip, engine)).reason.startswith("no plugin supports")
    ]
    return need(answers, "the plugin supports no engine")


@check(each=_supports, hook="engine_support")
def engine_support_is_complete(engine: str, answer: EngineSupport) -> Problems:
    stack, names = answer.stack, answer.visible_devices
    runs = answer.support is Support.IMPOSSIBLE or (answer.device_type and answer.distributed_backend)
    yield from (
        (not runs, " lacks device_type or distributed_backend", "give torch's names: both are needed to run"),
        (answer.support is not Support.YES and not answer.reason.strip(),
         f" is {answer.support.value!r} without a reason", "give a reason for `flag doctor` and `flag explain`"),
        (not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names), f": visible_devices = {names!r}",
         "give the names of environment variables, such as ACME_VISIBLE_DEVICES"),
        (stack and kind_of(engine) == "train" and stack.implementation not in IMPLEMENTATIONS,
         f": stack.implementation = {stack and stack.implementation!r}", f"use one of {', '.join(IMPLEMENTATIONS)}"),
    )  # fmt: skip
    for name, value in stack.settings.items() if stack else ():
        words, has = stack.source.detail.replace("-", "_") if stack else "", f": stack.settings has {name}: "
        yield (value is True and "overlap" in name and name not in words, f"{has}true, which its source does not name",
               "name the flag with the script that sets it, or write false")  # fmt: skip
        yield (not _is_setting(engine, name, () if value is None else (value,)), f"{has}{value!r}",
               "name a setting of the engine and a valid value (docs/spec.md)")  # fmt: skip


def _rules(plugin: Subject) -> Items:
    """Return, for each rule about values: the beginning of messages, the engine and the rule."""
    rules = [
        (f"flagcore_check_task: {engine} on {chip.name}: ", engine, rule)
        for chip, engine, advice in plugin.advice
        for rule in advice.rules
    ]
    return need(rules, "the plugin has no rules about values")


COMPLETE = "give a name of letters and underscores, a reason for `flag explain`, and what the rule is about"
VALID = "name a knob or a setting of the engine and valid values (docs/spec.md, docs/spec-serve.md)"


@check(VALID, each=_rules, hook="check_task")
def rules_of_engines_are_complete_and_known(engine: str, rule: ValueRule) -> Problems:
    is_named = rule.name.isidentifier() and bool(rule.reason.strip())
    if isinstance(rule, ForcedSetting):
        is_setting = rule.setting.startswith(SHARED_PREFIXES)
        yield (not (is_named and is_setting),
               f"{rule.name!r} forces {rule.setting!r}, which begins with none of {PREFIXES}", COMPLETE)  # fmt: skip
        is_known = not is_setting or _is_known(engine, rule.setting, (rule.value,))
        yield not is_known, f"{rule.name} forces {rule.setting} = {rule.value!r}, which is not a valid setting"
    else:
        yield not (is_named and (rule.values or rule.above is not None)), f"{rule.name!r} is incomplete", COMPLETE
        yield not _is_known(engine, rule.knob, rule.values), f"unknown knob {rule.knob!r} with {rule.values}"


@check("if the engine cannot run at all, return Support.IMPOSSIBLE with a reason", hook="check_task")
def refused_values_leave_candidates(plugin: Subject) -> Problems:
    _rules(plugin)
    for chip, engine, advice in (each for each in plugin.advice if each[2].rules):
        refusals = [rule for rule in advice.rules if isinstance(rule, RefusedValues)]
        for axis in find_engine(engine).axes(task_on(chip, engine)):
            refused_values = {value for rule in refusals if rule.knob == axis.knob for value in rule.values}
            is_empty = {*axis.values} <= refused_values
            yield is_empty, f"flagcore_check_task: {engine} on {chip.name}: every value of {axis.knob} is refused"


HARDWARE = re.compile(r"\bunits?\b|hardware|(does|do) not support")


@check("remove the peak or the rule, or restrict the rule to other chips")
def refused_precisions_have_no_peak(plugin: Subject) -> Problems:
    for chip, _, advice in plugin.advice:
        peaks = {*chip.dense_flops_per_second}
        for rule in (rule for rule in advice.rules if isinstance(rule, RefusedValues) and rule.knob == "precision"):
            refused, usable = {*map(str, rule.values)}, peaks & {"bf16", "fp16"}
            where, none_left = f"quirks.yaml: {rule.name} refuses", usable and usable <= refused
            for value in refused & peaks if HARDWARE.search(rule.reason) else ():
                yield f"{where} {value} on {chip.name}, whose file has a peak in it"
            yield none_left, f"{where} {', '.join(sorted(usable))} on {chip.name}: no 16-bit format is left"


PREFIX = "engine_args."


@check(
    "advise on what this task lacks: names, reasons and known settings; a small task on one node can run",
    hook="check_task",
)
def advice_on_tasks_is_complete(plugin: Subject) -> Problems:
    for task in plugin.tasks():
        where = f"flagcore_check_task: a small task on one node of {task.cluster.chips}"
        advice = plugin.loaded.check_task(task)
        why_not = f"{where} cannot run: {advice.impossible}; if nothing can, flagcore_engine_support says so"
        yield advice.impossible, why_not
        for each in advice.preferred:
            flag = each.setting.removeprefix(PREFIX)
            is_complete = each.reason.strip() and each.setting.startswith((*SHARED_PREFIXES, "precision"))
            yield (flag != each.setting and "_" in flag, f"{where}: {each.setting} is not the name of a flag",
                   f"write it with dashes: {PREFIX}{flag.replace('_', '-')}")  # fmt: skip
            yield (not is_complete, f"{where}: {each.setting!r} lacks a reason, or begins with none of {PREFIXES}",
                   "give a reason and a setting")  # fmt: skip
        yield not all(note.strip() for note in advice.notes), f"{where}: a note is empty"


def _is_known(engine: str, key: str, values: tuple[object, ...]) -> bool:
    """Return whether `values` are valid for `key`: a knob, a key of the job or a setting of an engine.

    Nothing is known of an engine without such keys, such as one whose knobs each spec names: all values are valid.
    """
    where, _, name = key.rpartition(".")
    if key == "precision":
        return set(values) <= set(PRECISIONS)
    if key in JOB_KEYS or where == "engine_args":
        return True
    scope = "setting" if where == "settings" else "space"
    knobs = {name: knob for knob in find_engine(engine).knobs if scope in knob.scope for name in knob.names}
    with suppress(SpecError, KeyError):
        for value in values:
            knobs[name].parse(value, key)
        return name in knobs or not knobs
    return not knobs


def _is_setting(engine: str, name: str, values: tuple[object, ...]) -> bool:
    """Return whether an engine of this kind has a setting with these values: a stack is that of all of them.

    Nothing is known of an engine without settings.
    """
    if _is_known(engine, f"settings.{name}", values):
        return True
    others = [find_engine(each) for each in names(ENGINES) if kind_of(each) == kind_of(engine)]
    known = [each.name for each in others for knob in each.knobs if "setting" in knob.scope and name in knob.names]
    return any(_is_known(each, f"settings.{name}", values) for each in known)


def scoped(plugin: Subject) -> Items:
    """Yield the location and the content of each entry of a file that may be restricted to chips or engines."""
    quirks = read_quirks(plugin.package)
    for section in fields(quirks):
        for place, each in enumerate(getattr(quirks, section.name)):
            yield f"quirks.yaml: {section.name}[{place}]", plugin, each
    yield from ((f"environment.yaml: {each.name}", plugin, each) for each in read_variables(plugin.package))
    yield from ((f"knobs.yaml: {each.knob.name}", plugin, each.scope) for each in all_knobs(plugin.package))


OF_AGE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)+)[^\s,;)]*\)?,? and (?:older|earlier|newer|later)")


@check("correct engines, kinds, chips or versions: together they must leave something", each=scoped)
def entries_apply_somewhere(plugin: Subject, scope: Scope) -> Problems:
    known = f"engines are {', '.join(plugin.engines)}; chips are those of chips/*.yaml"
    for word in {*scope.engines} - {*plugin.engines} | {*scope.chips} - {chip.name for chip in plugin.chips}:
        yield True, f" is for the unknown {word!r}", known
    kinds = {kind_of(each) for each in scope.engines if each in plugin.engines}
    range_ = SpecifierSet(scope.versions, prereleases=True)
    yield (kinds and scope.kinds and not kinds & {*scope.kinds},
           f" has engines {', '.join(scope.engines)} and kinds {', '.join(scope.kinds)}: it never applies")  # fmt: skip
    has_release = not scope.versions or any(map(range_.contains, _near_versions(range_)))
    yield not has_release, f" has versions {scope.versions!r}, which no release has"
    for release in OF_AGE.findall(str(getattr(scope, "reason", ""))) if scope.versions else ():
        yield (not range_.contains(release), f".versions = {scope.versions!r}, and reason has {release}",
               "correct versions, or the reason: they must contain a release that the reason names")  # fmt: skip
    for key, words in (("engines", scope.engines), ("chips", scope.chips)):
        yield from (f" has {word} {times} times in {key}" for word, times in repeated(words))


def _near_versions(versions: SpecifierSet) -> Iterator[str]:
    """Yield releases at, just below and just above the bounds of a range."""
    for each in versions:
        exact = each.version.replace(".*", "")
        yield exact
        if each.operator == "===":  # it may be any text
            continue
        major, minor, patch = [*Version(exact).release, 0, 0][:3]
        bound = f"{major}.{minor}.{patch}"
        yield from (bound, f"{bound}.1", f"{major}.{minor}.{patch + 1}", "0.0.1", "9999")
        yield from (f"{major}.{max(minor - 1, 0)}.9999", f"{major}.{minor}.{max(patch - 1, 0)}")


MOST_STEPS = 50
WHOLE_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


@check()
def quirks_agree_with_their_reasons(plugin: Subject) -> Problems:
    quirks = plugin.quirks
    for place, refused in enumerate(quirks.refused):
        above, reason = refused.above, refused.reason
        shown = f"quirks.yaml: refused[{place}].above = {above}: every value is refused"
        yield above is not None and above < 1, shown, "give the largest value that works, at least 1"
        for value in refused.values:
            yield (re.search(rf"\buses( only)? {re.escape(str(value))}\b", reason),
                   f"quirks.yaml: {refused.name} refuses {value!r}, and its reason says {reason!r}",
                   "remove the value from the list, or correct the reason")  # fmt: skip
    for place, warmup in enumerate(quirks.warmup):
        yield (warmup.count > MOST_STEPS, f"quirks.yaml: warmup[{place}].count = {warmup.count}",
               "give the number of first steps or requests that are slow, usually below ten")  # fmt: skip
    for place, preferred in enumerate(quirks.preferred):
        value, numbers = preferred.value, WHOLE_NUMBER.findall(preferred.reason)
        yield (isinstance(value, int) and not isinstance(value, bool) and numbers and str(value) not in numbers,
               f"quirks.yaml: preferred[{place}].value = {value}, and its reason is {preferred.reason[:80]!r}",
               "write the value that the reason states, or correct the reason")  # fmt: skip


@check("keep one of them, or restrict each by engines, chips or versions", hook="check_task")
def rules_do_not_contradict(plugin: Subject) -> Problems:
    names = [*(rule.name for rule in plugin.quirks.refused), *(rule.name for rule in plugin.quirks.forced)]
    for name, times in repeated(names):
        fix = "give each rule its own name: reports name the rule"
        yield True, f"quirks.yaml: {times} rules have the name {name}", fix
    for chip, engine, advice in plugin.advice:
        refused = {rule.knob: {*map(str, rule.values)} for rule in advice.rules if isinstance(rule, RefusedValues)}
        forced = {rule.setting: rule.value for rule in advice.rules if isinstance(rule, ForcedSetting)}
        preferred = [("preferred", each.setting, each.value) for each in advice.preferred]
        for kind, name, value in (*preferred, *(("forced", *item) for item in forced.items())):
            shown = f"quirks.yaml: {engine} on {chip.name}: {kind} has {name} = {value!r}"
            yield str(value) in refused.get(name, ()), f"{shown}, which refused has too"
            yield forced.get(name, value) != value, f"{shown}, and forced {forced.get(name)!r}"


@check("name a flag of the engine and a value that it accepts")
def preferred_flags_are_known(plugin: Subject) -> Problems:
    for engine in plugin.engines:
        program: Any = getattr(find_engine(engine), "program", None)
        advice = [each for _, name, each in plugin.advice if name == engine]
        rules: list[tuple[str, object]] = [(each.setting, each.value) for one in advice for each in one.preferred]
        rules += [(rule.setting, rule.value) for one in advice for rule in one.rules if isinstance(rule, ForcedSetting)]
        for setting, value in (pair for pair in dict.fromkeys(rules) if pair[0].startswith(PREFIX)):
            shown = f"quirks.yaml: {setting} is for {engine}, which has no engine_args: they are of serving engines"
            yield kind_of(engine) == "train", shown
            if hasattr(program, "knob_of"):
                yield from _flag_problem(program, engine, setting, value)


def _flag_problem(program: Any, engine: str, setting: str, value: object) -> Iterator[str]:
    name, shown = program.full_name(setting.removeprefix(PREFIX)), f"quirks.yaml: {setting} = {value!r} of {engine}"
    knob, _ = program.knob_of(name)
    if knob is not None:
        try:
            knob.parse(value, setting)
        except SpecError as error:
            yield f"{shown}: {error.problem}"
    elif program.flags and name not in program.flags and (near := get_close_matches(name, program.flags, n=1)):
        yield f"quirks.yaml: {setting} is no flag of {engine}, but {near[0]} is"
    if isinstance(value, str) and re.fullmatch(r"\d[\d.]*\s+\w+", value):
        yield f"{shown} has a unit"


@check("keep one of them")
def lists_have_no_duplicates(plugin: Subject) -> Problems:
    for name, content in plugin.yaml_files("**/*.yaml"):
        for path, key, items in _lists(content):
            of_choices = key == "choices"
            values = [item.get("value", item) if of_choices and isinstance(item, dict) else item for item in items]
            for place, value in enumerate(values):
                is_number = isinstance(value, int | float) and not of_choices
                shown = value.get("name", value) if isinstance(value, dict) else value
                is_twice = not is_number and value in values[:place]
                yield is_twice, f"{name}: {path}{key} has {str(shown)[:60]!r} twice"


def _lists(content: Any, path: str = "") -> Iterator[tuple[str, str, list[Any]]]:
    """Yield every list of a file with the path before it and its key."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, list):
            yield path, str(key), value
            for place, item in enumerate(value):
                yield from _lists(item, f"{path}{key}[{place}].")
        yield from _lists(value, f"{path}{key}.")


MOST = 5.0
"""Maximum factor of a knob on time or memory."""


def _knobs(plugin: Subject) -> Items:
    found: list[tuple[str, str, Knob, set[str]]] = []
    for chip, engine in plugin.pairs():
        knobs = plugin.loaded.knobs(chip, engine)
        axes = find_engine(engine).axes(task_on(chip, engine)) if knobs else ()
        names = {axis.knob for axis in axes}
        found += [(f"flagcore_knobs: {knob.name} of {engine}", engine, knob, names) for knob in knobs]
    return need(found, "the plugin adds no knobs")


@check(each=_knobs, hook="knobs")
def knobs_are_complete(engine: str, knob: Knob, names: set[str]) -> Problems:
    effects = [*knob.effects.values()]
    factors = [each for effect in effects for each in (effect.time, effect.memory)]
    is_estimated = knob.source is not None and knob.source.kind == "estimated"
    is_free = knob.effect_source is None and not is_estimated and any(each != Factor() for each in factors)
    wide = [factor.value for factor in factors if not 1 / MOST <= factor.value <= MOST]
    yield from (
        (not knob.help.strip(), " has no help", "add a sentence for `flag explain`"),
        (knob.name in names, " is already one of its knobs", "rename it, for example with the vendor as prefix"),
        (any(factor.value != 1.0 and factor.low == factor.high for factor in factors),
         " scales the time or the memory without an interval", "give low and high, the ends of an 80% interval"),
        (knob.answers not in ANSWERS, f" has answers {knob.answers!r}", f"use one of {', '.join(ANSWERS)}"),
        (wide, f" has the factor {[*wide, 0.0][0]:g}", "give a ratio: 8% less time are 0.92"),
        (is_free, " has factors without a source",
         "add effect: {kind: estimated, method: WHY}, or the source of these figures"),
    )  # fmt: skip
    parts, fix = (WHOLE_STEP, *PART_NAMES), "write the flag and its value as two entries of the list"
    for effect in effects:
        first, blank = [*effect.flags, ""][0], next((flag for flag in effect.flags if re.search(r"^-.*\s", flag)), "")
        yield effect.flags and not first.startswith("-"), f" has the flag {first!r}", "write it with its dashes"
        yield blank, f" has the flag {blank!r}, which is passed as one argument", fix
        is_unknown = kind_of(engine) == "train" and {*effect.part.split()} - {*parts}
        yield is_unknown, f" scales the unknown part {effect.part!r}", f"the parts are {', '.join(parts)}"


LARGE_GAIN, LARGE_LOSS = 0.85, 1.5
"""A smaller factor of the whole step needs a published figure; a larger one is never the best without memory saved."""
GAIN = re.compile(r"\d+ ?% (more throughput|faster|less time)|\bfaster\b|higher throughput")
DIVIDE = "give the time with the knob divided by the time without it: 8% more throughput are 0.93"


@check()
def knobs_name_what_the_engine_has(plugin: Subject) -> Problems:
    listed = plugin.shipped("knobs.yaml", all_knobs)
    defaults = {
        each.name: each.used for each in read_variables(plugin.package) if each.condition.startswith("the default")
    }
    for each in listed:
        yield from wrong(_value_problems(each.knob, defaults), f"knobs.yaml: {each.knob.name}")
        for engine in (name for name in each.scope.engines if name in plugin.engines):
            if known := {name for one in find_engine(engine).knobs for name in one.names}:
                needed = _need_problems(each.knob, engine, known | {one.knob.name for one in listed})
                yield from wrong(needed, f"knobs.yaml: {each.knob.name}.needs has ")
                yield from wrong(_effect_problems(each.knob, engine, known), f"knobs.yaml: {each.knob.name}: ")


def _value_problems(knob: Knob, defaults: dict[str, str]) -> Iterator[Case]:
    """Yield values of a knob that are equal, and those of several types."""
    kinds = {type(value).__name__ for value in (*knob.effects, knob.neutral) if value is not None}
    yield (len(kinds) > 1, f": default and choices are of the types {', '.join(sorted(kinds))}",
           "write values of one type: true without quotes, 1 and not true")  # fmt: skip
    yield (knob.neutral in knob.effects, f".choices has the value {knob.neutral!r}, which is the default",
           "list only other values: the default has no effect")  # fmt: skip
    seen = dict[str, object]()
    for value, effect in knob.effects.items():
        launched = f"{effect.flags} {sorted(effect.environment.items())}"
        yield ((effect.flags or effect.environment) and launched in seen,
               f": {value!r} and {seen.get(launched)!r} set the same",
               "give each value the flags or variables that enable it")  # fmt: skip
        for name, word in effect.environment.items():
            is_usual, fix = defaults.get(name) == word != str(value), "do not list the default as another value"
            yield is_usual, f": {value!r} sets {name} = {word!r}, its default", fix
        seen[launched] = value


def _need_problems(knob: Knob, engine: str, known: set[str]) -> Iterator[Case]:
    for each in knob.requires:
        words = each.knob.removeprefix("enable_").replace("_", " ")
        quoted = {"true", "false"} & {str(one).casefold() for one in each.one_of if isinstance(one, str)}
        said = re.search(rf"\b(with|without) {words}\b", knob.help)
        low, high = each.at_least, each.at_most
        yield from (
            (each.knob not in known, f"the knob {each.knob!r}, which {engine} lacks", "name a knob of the engine"),
            (quoted, f"one_of {min(quoted, default='')!r}, which no value equals",
             "write true or false without quotes"),
            (said and (said[1] == "with") not in each.one_of,
             f"{each.knob} one_of {[*each.one_of]}, and says has {said and said[0]!r}",
             "write the value for which the knob has an effect"),
            (low is not None and high is not None and low > high, f"at_least {low} above at_most",
             "correct one of them"),
        )  # fmt: skip


def _effect_problems(knob: Knob, engine: str, known: set[str]) -> Iterator[Case]:
    method, claim = knob.effect_source.detail if knob.effect_source else "", knob.claim
    for value, effect in knob.effects.items():
        time, saves_nothing, has = effect.time.value, effect.memory.value >= 1.0, f"{value!r} has "
        for name in {*effect.settings} - known:
            yield True, f"{has}settings.{name}, which {engine} lacks", "name a setting of the engine"
        yield from (
            (time > 1.0 and GAIN.search(claim) and saves_nothing,
             f"{has}the time {time:g}, and claim = {claim[:60]!r}", DIVIDE),
            ("formula of " in method and not effect.settings,
             f"{has}no settings, and its effect is that of {method[:60]!r}",
             "name the setting of the engine whose formula predicts, or give the factors"),
            (effect.part == WHOLE_STEP and time < LARGE_GAIN and not re.search(r"\d", claim),
             f"{has}the time {time:g} of the whole step, and claim has no figure",
             "name the part of the step that gets faster, such as part: tp_comm_s, or quote the gain"),
            (LARGE_LOSS < time <= MOST and saves_nothing,
             f"{has}the time {time:g} and saves no memory: it is never the best", DIVIDE),
        )  # fmt: skip
