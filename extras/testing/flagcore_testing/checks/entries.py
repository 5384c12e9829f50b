"""Checks of entries that are valid one by one, but apply nowhere, contradict others, or name what an engine lacks."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from flagcore_vendorkit.engines import all_knobs, read_quirks, read_variables
from flagcore_vendorkit.fields import Scope
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from flagcore.domain.chip import Chip
from flagcore.domain.engine import ForcedSetting, RefusedValues
from flagcore.domain.knob import WHOLE_STEP, Knob
from flagcore.errors import SpecError
from flagcore.plugins import find_engine, kind_of
from flagcore_testing.checks.chips import mappings
from flagcore_testing.checks.engines import MOST
from flagcore_testing.examples import task_on
from flagcore_testing.kit import Problem, Problems, Skip, Subject, check


def scoped(plugin: Subject) -> Iterator[tuple[Subject, str, Scope]]:
    """Yield the location and the content of each entry of a file that may be restricted to chips or engines."""
    quirks = read_quirks(plugin.package)
    for section in fields(quirks):
        for place, each in enumerate(getattr(quirks, section.name)):
            yield plugin, f"quirks.yaml: {section.name}[{place}]", each
    yield from ((plugin, f"environment.yaml: {each.name}", each) for each in read_variables(plugin.package))
    yield from ((plugin, f"knobs.yaml: {each.knob.name}", each.scope) for each in all_knobs(plugin.package))


@check(each=scoped)
def entries_name_known_engines_and_chips(plugin: Subject, where: str, scope: Scope) -> Problems:
    fix = f"engines are {', '.join(plugin.engines)}; chips are those of chips/*.yaml"
    unknown = {*scope.engines} - {*plugin.engines} | {*scope.chips} - {chip.name for chip in plugin.chips}
    for word in unknown:
        yield Problem(f"{where} is for the unknown {word!r}", fix)


@check("correct engines, kinds, chips or versions: together they must leave something", each=scoped)
def entries_apply_somewhere(plugin: Subject, where: str, scope: Scope) -> Problems:
    kinds = {kind_of(each) for each in scope.engines if each in plugin.engines}
    if kinds and scope.kinds and not kinds & {*scope.kinds}:
        yield f"{where} has engines {', '.join(scope.engines)} and kinds {', '.join(scope.kinds)}: it never applies"
    range_ = SpecifierSet(scope.versions, prereleases=True)
    if scope.versions and not any(map(range_.contains, _near_versions(range_))):
        yield f"{where} has versions {scope.versions!r}, which no release has"
    for key, words in (("engines", scope.engines), ("chips", scope.chips)):
        for word, times in Counter(words).items():
            if times > 1:
                yield f"{where} has {word} {times} times in {key}"


OF_AGE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)+)[^\s,;)]*\)?,? and (?:older|earlier|newer|later)")


@check("correct versions, or the reason: they must contain a release that the reason names")
def versions_are_those_of_their_reasons(plugin: Subject) -> Problems:
    for name, content in plugin.yaml_files("quirks.yaml"):
        for path, entry in mappings(content):
            versions = str(entry.get("versions") or "")
            for release in OF_AGE.findall(str(entry.get("reason"))) if versions else ():
                if not SpecifierSet(versions, prereleases=True).contains(release):
                    yield f"{name}: {path}versions = {versions!r}, and reason has {release}"


def _near_versions(versions: SpecifierSet) -> Iterator[str]:
    """Yield releases at, just below and just above the bounds of a range."""
    for each in versions:
        exact = each.version.replace(".*", "")
        yield exact
        if each.operator == "===":  # it may be any text
            continue
        release = [*Version(exact).release, 0, 0][:3]
        bound = ".".join(map(str, release))
        yield from (bound, f"{bound}.1", f"{release[0]}.{release[1]}.{release[2] + 1}", "0.0.1", "9999")
        yield f"{release[0]}.{max(release[1] - 1, 0)}.9999"
        yield f"{release[0]}.{release[1]}.{max(release[2] - 1, 0)}"


@check("give the largest value that works, at least 1")
def limits_leave_something(plugin: Subject) -> Problems:
    for place, each in enumerate(plugin.quirks.refused):
        if each.above is not None and each.above < 1:
            yield f"quirks.yaml: refused[{place}].above = {each.above}: every value is refused"


@check("keep one of them, or restrict each by engines, chips or versions")
def rules_do_not_contradict(plugin: Subject) -> Problems:
    plugin.implements("flagcore_check_task")
    names = [*(rule.name for rule in plugin.quirks.refused), *(rule.name for rule in plugin.quirks.forced)]
    for name, times in Counter(names).items():
        if times > 1:
            text = f"quirks.yaml: {times} rules have the name {name}"
            yield Problem(text, "give each rule its own name: reports name the rule")
    for chip, engine in plugin.pairs():
        advice = plugin.loaded.check_task(task_on(chip, engine))
        refused = {rule.knob: {*map(str, rule.values)} for rule in advice.rules if isinstance(rule, RefusedValues)}
        forced = {rule.setting: rule.value for rule in advice.rules if isinstance(rule, ForcedSetting)}
        where = f"quirks.yaml: {engine} on {chip.name}"
        for each in advice.preferred:
            if str(each.value) in refused.get(each.setting, ()):
                yield f"{where}: preferred has {each.setting} = {each.value!r}, which refused has too"
            if forced.get(each.setting, each.value) != each.value:
                yield f"{where}: preferred has {each.setting} = {each.value!r}, and forced {forced[each.setting]!r}"
        for name, value in forced.items():
            if str(value) in refused.get(name, ()):
                yield f"{where}: forced has {name} = {value!r}, which refused has too"


PREFIX = "engine_args."


@check("name a flag of the engine and a value that it accepts")
def preferred_flags_are_known(plugin: Subject) -> Problems:
    for engine in plugin.engines:
        program: Any = getattr(find_engine(engine), "program", None)
        advice = [plugin.loaded.check_task(task_on(chip, engine)) for chip in plugin.own_chips()]
        rules: list[tuple[str, object]] = [(each.setting, each.value) for one in advice for each in one.preferred]
        rules += [(rule.setting, rule.value) for one in advice for rule in one.rules if isinstance(rule, ForcedSetting)]
        for setting, value in dict.fromkeys(rules):
            if setting.startswith(PREFIX) and kind_of(engine) == "train":
                yield f"quirks.yaml: {setting} is for {engine}, which has no engine_args: they are of serving engines"
            if setting.startswith(PREFIX) and hasattr(program, "knob_of"):
                yield from _flag_problem(program, engine, setting, value)


def _flag_problem(program: Any, engine: str, setting: str, value: object) -> Iterator[str]:
    name = program.full_name(setting.removeprefix(PREFIX))
    knob, _ = program.knob_of(name)
    if knob is not None:
        try:
            knob.parse(value, setting)
        except SpecError as error:
            yield f"quirks.yaml: {setting} = {value!r} of {engine}: {error.problem}"
    elif program.flags and name not in program.flags and (near := get_close_matches(name, program.flags, n=1)):
        yield f"quirks.yaml: {setting} is no flag of {engine}, but {near[0]} is"
    if isinstance(value, str) and re.fullmatch(r"\d[\d.]*\s+\w+", value):
        yield f"quirks.yaml: {setting} = {value!r} of {engine} has a unit"


@check("keep one of them")
def lists_have_no_duplicates(plugin: Subject) -> Problems:
    for name, content in plugin.yaml_files("**/*.yaml"):
        for path, key, items in _lists(content):
            values = [_identity(item) if key == "choices" else item for item in items]
            for place, value in enumerate(values):
                is_number = isinstance(value, int | float) and key != "choices"
                if not is_number and value in values[:place]:
                    shown = value.get("name", value) if isinstance(value, dict) else value
                    yield f"{name}: {path}{key} has {str(shown)[:60]!r} twice"


def _identity(choice: Any) -> Any:
    """Return the value of a choice of a knob."""
    return choice.get("value", choice) if isinstance(choice, dict) else choice


def _lists(content: Any, path: str = "") -> Iterator[tuple[str, str, list[Any]]]:
    """Yield every list of a file with the path before it and its key."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, list):
            yield path, str(key), value
            for place, item in enumerate(value):
                yield from _lists(item, f"{path}{key}[{place}].")
        yield from _lists(value, f"{path}{key}.")


MOST_STEPS = 50


@check("give the number of first steps or requests that are slow, usually below ten")
def warmups_are_short(plugin: Subject) -> Problems:
    for place, each in enumerate(plugin.quirks.warmup):
        if each.count > MOST_STEPS:
            yield f"quirks.yaml: warmup[{place}].count = {each.count}"


UNSET = re.compile(r"\b(?:leave|unset|do not set) ([A-Z][A-Z0-9_]{4,})")


@check("remove the value, or the note")
def variables_are_not_those_that_notes_warn_of(plugin: Subject) -> Problems:
    warned = {name: each.note for each in plugin.quirks.notes for name in UNSET.findall(each.note)}
    for each in plugin.variables:
        if each.value and each.name in warned:
            yield f"environment.yaml: {each.name} = {each.value!r}, and quirks.yaml has {warned[each.name][:80]!r}"


@check("write the value that the reason states, or correct the reason")
def preferred_values_are_those_of_their_reasons(plugin: Subject) -> Problems:
    for place, each in enumerate(plugin.quirks.preferred):
        numbers = re.findall(r"(?<![\w.])\d+(?![\w.])", each.reason)
        if (
            isinstance(each.value, int)
            and not isinstance(each.value, bool)
            and numbers
            and str(each.value) not in numbers
        ):
            yield f"quirks.yaml: preferred[{place}].value = {each.value}, and its reason is {each.reason[:80]!r}"


@check()
def knobs_name_what_the_engine_has(plugin: Subject) -> Problems:
    listed = plugin.shipped("knobs.yaml", all_knobs)
    for each in listed:
        for engine in (name for name in each.scope.engines if name in plugin.engines):
            yield from _knob_problems(each.knob, engine, {one.knob.name for one in listed})


LARGE_GAIN = 0.85
"""A smaller factor of the whole step needs a published figure."""
GAIN = re.compile(r"\d+ ?% (more throughput|faster|less time)|\bfaster\b|higher throughput")


def _knob_problems(knob: Knob, engine: str, own: set[str]) -> Iterator[Problem]:
    where, known = f"knobs.yaml: {knob.name}", {name for one in find_engine(engine).knobs for name in one.names}
    if not known:
        return
    for need in knob.requires:
        if need.knob not in known | own:
            text = f"{where}.needs has the knob {need.knob!r}, which {engine} lacks"
            yield Problem(text, "name a knob of the engine")
        for word in {"true", "false"} & {str(each).casefold() for each in need.one_of if isinstance(each, str)}:
            text = f"{where}.needs has one_of {word!r}, which no value equals"
            yield Problem(text, "write true or false without quotes")
        words = need.knob.removeprefix("enable_").replace("_", " ")
        if (said := re.search(rf"\b(with|without) {words}\b", knob.help)) and (said[1] == "with") not in need.one_of:
            text = f"{where}.needs has {need.knob} one_of {[*need.one_of]}, and says has {said[0]!r}"
            yield Problem(text, "write the value for which the knob has an effect")
        if need.at_least is not None and need.at_most is not None and need.at_least > need.at_most:
            yield Problem(f"{where}.needs has at_least {need.at_least} above at_most", "correct one of them")
    kinds = {type(value).__name__ for value in (*knob.effects, knob.neutral) if value is not None}
    if len(kinds) > 1:
        text = f"{where}: default and choices are of the types {', '.join(sorted(kinds))}"
        yield Problem(text, "write values of one type: true without quotes, 1 and not true")
    if knob.neutral in knob.effects:
        text = f"{where}.choices has the value {knob.neutral!r}, which is the default"
        yield Problem(text, "list only other values: the default has no effect")
    for value, effect in knob.effects.items():
        for name in {*effect.settings} - known:
            text = f"{where}: {value!r} has settings.{name}, which {engine} lacks"
            yield Problem(text, "name a setting of the engine")
        method = knob.effect_source.detail if knob.effect_source else ""
        if effect.time.value > 1.0 and GAIN.search(knob.claim) and effect.memory.value >= 1.0:
            text = f"{where}: {value!r} has the time {effect.time.value:g}, and claim = {knob.claim[:60]!r}"
            yield Problem(
                text, "give the time with the knob divided by the time without it: 8% more throughput are 0.93"
            )
        if "formula of " in method and not effect.settings:
            text = f"{where}: {value!r} has no settings, and its effect is that of {method[:60]!r}"
            yield Problem(text, "name the setting of the engine whose formula predicts, or give the factors")
        if effect.part == WHOLE_STEP and effect.time.value < LARGE_GAIN and not re.search(r"\d", knob.claim):
            text = f"{where}: {value!r} has the time {effect.time.value:g} of the whole step, and claim has no figure"
            yield Problem(
                text, "name the part of the step that gets faster, such as part: tp_comm_s, or quote the gain"
            )
        if 1.5 < effect.time.value <= MOST and effect.memory.value >= 1.0:
            text = f"{where}: {value!r} has the time {effect.time.value:g} and saves no memory: it is never the best"
            yield Problem(text, "give the time with the knob divided by the time without it")


@check("give each value the flags or variables that enable it, and do not list the default as another value")
def knob_values_differ(plugin: Subject) -> Problems:
    defaults = {each.name: each.used for each in plugin.variables if each.condition.startswith("the default")}
    for each in plugin.shipped("knobs.yaml", all_knobs):
        seen: dict[str, object] = {}
        for value, effect in each.knob.effects.items():
            launched = f"{effect.flags} {sorted(effect.environment.items())}"
            if (effect.flags or effect.environment) and launched in seen:
                yield f"knobs.yaml: {each.knob.name}: {value!r} and {seen[launched]!r} set the same"
            seen[launched] = value
            for name, word in effect.environment.items():
                if defaults.get(name) == word and word != str(value):
                    yield f"knobs.yaml: {each.knob.name}: {value!r} sets {name} = {word!r}, its default"


@check("remove the value from the list, or correct the reason")
def refused_values_are_not_those_that_work(plugin: Subject) -> Problems:
    for each in plugin.quirks.refused:
        for value in each.values:
            if re.search(rf"\buses( only)? {re.escape(str(value))}\b", each.reason):
                yield f"quirks.yaml: {each.name} refuses {value!r}, and its reason says {each.reason!r}"


@check("use the engine that reads the variable")
def variables_are_for_the_engine_that_reads_them(plugin: Subject) -> Problems:
    starts = {f"{re.sub(r'[^A-Z]', '', engine.upper())}_": engine for engine in plugin.engines}
    for each in plugin.variables:
        engine = starts.get(f"{each.name.partition('_')[0]}_", "")
        if engine and each.engines and engine not in each.engines:
            yield f"environment.yaml: {each.name} is for {', '.join(each.engines)}, and {engine} reads it"
        if engine and each.kinds and kind_of(engine) not in each.kinds:
            yield f"environment.yaml: {each.name} is for {', '.join(each.kinds)}, and {engine} reads it"


@check()
def values_hold_for_all_users(plugin: Subject) -> Problems:
    for each in plugin.variables:
        where, value = f"environment.yaml: {each.name} = {each.value!r}", each.value or ""
        if re.match(r"[/~]\w|[A-Z]:\\", value):
            fix = "use `used` instead of `value`, or name a file that the vendor installs on every machine"
            yield Problem(f"{where} is a path of one machine", fix)
        if value != value.strip() or value[:1] in ("'", '"'):
            yield Problem(f"{where} has quotes or spaces", "write the value as the program reads it")
        if re.fullmatch(r"\w+=.*", value) and value.startswith(each.name):
            yield Problem(f"{where} repeats the name", "write only the value")
        if value and not each.several_nodes and re.match(r"several nodes", each.condition):
            fix = "add several_nodes: true; condition is only a text"
            yield Problem(f"{where} is set for one node, too, but its condition is {each.condition!r}", fix)
        restricted = each.unless or each.several_nodes or each.chips or str(each.versions or "")
        if value and each.condition and not restricted:
            fix = "use `used` instead of `value`, or restrict it by unless, several_nodes, chips or versions"
            yield Problem(f"{where} is always set, and condition is {each.condition!r}, which is only a text", fix)
        if each.several_nodes and not value:
            yield Problem(f"{where}: several_nodes has no effect without value", "give value, or remove it")


def _chips_of_transcripts(plugin: Subject, files: tuple[str, ...]) -> set[str] | None:
    """Return the chips that transcripts list, or None if one of these lists no devices."""
    named = [each for each in plugin.transcripts if each.name in files]
    if len(named) < len(files) or not all(each.lists for each in named if each.tool):
        return None
    if not all(each.tool for each in named):
        return None
    listed = [one.chip for each in named for one in each.lists]
    return {chip.name for chip in plugin.chips if any(map(chip.has_name, listed))}


@check()
def maturity_is_that_of_the_files(plugin: Subject) -> Problems:
    maturity, _ = plugin.maturity, plugin.own_chips()
    for claim in maturity.checked_on_transcripts:
        where = f"maturity.yaml: {claim.what!r}"
        found: set[str] | None = None
        with suppress(Skip):
            found = _chips_of_transcripts(plugin, claim.files)
            for each in plugin.transcripts:
                if each.name in claim.files and each.tool and each.tool not in claim.by:
                    yield Problem(f"{where} has tool: {claim.by}, but {each.name} is of {each.tool}", "name that tool")
        for name in sorted({*claim.chips} - (found if found is not None else {*claim.chips})):
            yield Problem(f"{where} has the chip {name}, which its files do not list", "leave it out")
    works = [engine for chip, engine in plugin.pairs() if _works(plugin, chip, engine)]
    if works and not maturity.run_on_hardware:
        text = f"engines.yaml says works: true ({works[0]}), but maturity.yaml has no run_on_hardware"
        yield Problem(text, "add the run, or remove works: true")


def _works(plugin: Subject, chip: Chip, engine: str) -> bool:
    return plugin.loaded.engine_support(chip, engine).support.name == "YES"
