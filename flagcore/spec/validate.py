"""Validates plain data with pydantic models.

Error messages are derived from the JSON Schema of the model.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, cast, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, create_model
from pydantic_core import PydanticCustomError

from flagcore.domain.units import LONGEST_TEXT, Argument, Value
from flagcore.errors import SpecError, join_errors
from flagcore.i18n import N_, _, closest
from flagcore.spec.plain_data import KeyPath, key_text, package_yaml, spec_error

MAX_PROBLEMS = 20
"""The maximum number of problems that an error lists for one file."""
LISTED_KEYS = 5
"""The maximum number of keys of a section that a description of its valid values lists."""
DID_YOU_MEAN = N_("did you mean {name}?")
Schema = Mapping[str, Any]
M = TypeVar("M", bound=BaseModel)
ALIASES = package_yaml(__package__, "names.yaml")["aliases"]


class Section(BaseModel):
    """The base class of sections of a spec, with strict types, no unknown keys, and a docstring for each key."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)
    texts_from: ClassVar[tuple[type, ...]] = ()
    """Further classes whose docstrings of fields are those of keys."""

    def about_plan(self, tokens_per_second: Sequence[float]) -> str:
        """Return a sentence about a training plan with these rates: the expected one and, if known, the ends of its 80%
        interval, the higher first. By default empty."""
        return ""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """Return the JSON Schema with the docstrings, which are only read here, because pydantic takes long to."""
        schema: dict[str, Any] = handler(core)
        keys = handler.resolve_ref_schema(schema).get("properties", {})
        for name in (texts := texts_of(cls)).keys() & keys.keys():
            keys[name].setdefault("description", texts[name])
        return schema


class RecordSection(Section):
    """The base class of sections whose keys are fields of a record. Type checkers do not see these keys."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def keys_of_record(record: type, *names: str) -> Callable[[type[M]], type[M]]:
    """Return a decorator for a section whose keys are fields of a frozen dataclass, with its types, limits and texts.

    `names`: the fields that are keys, by default all of them. Keys that the section defines itself, because their type
    in a file differs, replace them, with the text of the field unless they have one; keys without a field come last.
    """

    def decorate(section: type[M]) -> type[M]:
        name_of, doc, base = section.__name__, section.__doc__, section.__base__
        hints = get_type_hints(record, include_extras=True)
        defaults = {each.name: ... if each.default is MISSING else each.default for each in fields(record)}
        keys = dict[str, Any]()
        for name in (*(names or defaults), *section.model_fields):
            own = section.model_fields.get(name)
            keys[name] = (own.annotation, own) if own else (hints[name], defaults[name])
        keys["texts_from"] = (ClassVar[tuple[type, ...]], (record, section))
        return cast("type[M]", create_model(name_of, __base__=base, __doc__=doc, **keys))

    return decorate


def texts_of(record: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass, or of the keys of a section, and of its bases."""
    texts = dict[str, str]()
    for base in reversed([each for each in record.__mro__[:-1] if each is not BaseModel]):
        for source in vars(base).get("texts_from", ()):
            texts |= texts_of(source)
        body = found.body if (found := _classes_of(base.__module__).get(base.__name__)) else []
        for target, each in pairwise(body):
            text = each.value if isinstance(each, ast.Expr) else None
            if isinstance(target, ast.AnnAssign) and isinstance(text, ast.Constant):
                texts[ast.unparse(target.target)] = inspect.cleandoc(str(text.value))
    return texts


@lru_cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes in the source of a module. It is parsed once for all of them, because that takes long."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The context in which a section is validated.

    `file`: the name of the file in errors.
    `base`: the folder of relative paths.
    `data`: the content of the whole file.
    """

    file: str = ""
    base: Path = Path()
    data: Mapping[str, Any] = field(default_factory=dict)

    def given(self, *keys: str) -> Any:
        """Return the value in `data` under a path of keys, or None if it is missing. It may be invalid."""
        value: Any = self.data
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def rule(convert: Callable[[Any, Context], object]) -> AfterValidator:
    """Return a validator that replaces a valid value with `convert(value, context)`.

    If `convert` raises a SpecError, its key is relative to the value, unless the error names a file.
    """

    def validate(value: object, info: "ValidationInfo[Any]") -> object:
        try:
            return convert(value, info.context)
        except SpecError as error:
            problems = error.problems
        raise PydanticCustomError("rule", "invalid value", {"problems": problems})

    return AfterValidator(validate)


def _with_program(words: list[str], context: Context) -> list[str]:
    """Return the words of a command. Raises SpecError if the first one, which names the program, is empty."""
    if not words[0]:
        problem, fix = _("is empty"), _("give the name or the path of a program")
        raise spec_error((0,), problem, value=words[0], fix=fix)
    return words


Command = Annotated[list[Argument], Field(min_length=1), rule(_with_program)]
"""The words of a command; all but the first may be empty."""


def checked(kind: type[M], data: object, context: Context = Context()) -> M:
    """Return `data` as an instance of the model `kind`. Raises SpecError with all problems."""
    found, problems = validated(kind, data, context)
    if found is None:
        raise join_errors(problems)
    return found


def validated(kind: type[M], data: object, context: Context) -> tuple[M | None, list[SpecError]]:
    """Return `data` as an instance of the model `kind`, or None, and all problems.

    Problems with single keys come first, then broken rules.
    """
    kinds: dict[KeyPath, str] = {}
    broken: list[SpecError] = []
    try:
        return kind.model_validate(data, context=context), broken
    except ValidationError as error:
        for item in error.errors(include_url=False):
            path = _in_data(data, item["loc"][:-2] if item["loc"][-1:] == ("[key]",) else item["loc"])
            if item["type"] == "rule":
                broken += [located(each, path, context.file) for each in item["ctx"]["problems"]]
            missing = item["type"] == "missing"
            kinds.setdefault((*path, item["loc"][-1]) if missing else path, item["type"])
    return None, _problems(_schema(kind), data, kinds, context.file) + broken


def located(error: SpecError, path: KeyPath, file: str) -> SpecError:
    """Return a copy of an error whose key is relative to `path`, with the complete key and the file.

    An error that names another file is returned unchanged.
    """
    if error.file:
        return error
    start, key = key_text(path) if path else "", error.key
    if start and key != start and not key.startswith((f"{start}.", f"{start}[")):
        key = start + ("" if not key or key.startswith("[") else ".") + key
    return spec_error(key, error.problem, value=error.value, fix=error.fix, file=file)


@lru_cache(maxsize=64)
def _schema(kind: type[BaseModel]) -> Schema:
    return kind.model_json_schema()


def describe(schema: Schema, root: Schema) -> str:
    """Return a description of the values that `schema` accepts. `root` is the JSON Schema that contains it."""
    parts = list(_alternatives(schema, root))
    words = [*dict.fromkeys(word for part in parts if part.get("type") != "array" for word in _words_of(part))]
    for part in parts:
        if part.get("type") == "array":
            items = [word for item in _alternatives(part["items"], root) for word in _words_of(item)]
            list_text = _("a non-empty list, each item {values}", values=_join_with_or(items))
            words.append(_("a non-empty list of these") if set(items) <= set(words) else list_text)
    return _join_with_or(words)


def keys_of(schema: Schema, root: Schema, at: KeyPath = ()) -> Iterator[tuple[KeyPath, Schema]]:
    """Yield the path and the schema of each key below `schema`. `root` is the JSON Schema that contains it.

    Paths do not include list indices.
    """
    for part in _alternatives(schema, root):
        for name, subschema in part.get("properties", {}).items():
            yield (*at, name), subschema
            yield from keys_of(subschema, root, (*at, name))
        if "items" in part:
            yield from keys_of(part["items"], root, at)


def _join_with_or(words: list[str]) -> str:
    return words[0] if len(words) == 1 else _("{first} or {last}", first=", ".join(words[:-1]), last=words[-1])


def _words_of(part: Schema) -> list[str]:
    """Return descriptions of the values that a schema without alternatives accepts."""
    kind = part.get("type")
    if "const" in part or "enum" in part:
        return [str(word) for word in part.get("enum", [part.get("const")])]
    if kind == "boolean":
        return ["true", "false"]
    for _kind, limits, text in (row for row in TEXTS if row[0] == kind and {*row[1].values()} <= part.keys()):
        given = {name: part[limit][0] if limit == "examples" else part[limit] for name, limit in limits.items()}
        return [_(text, **given)]
    if 0 < len(keys := list(part.get("properties", {}))) <= LISTED_KEYS:
        return [_("a mapping with keys such as {keys}", keys=", ".join(keys))]
    if kind == "object" and "examples" in part:
        example = ", ".join(f"{key}: {value}" for key, value in part["examples"][0].items())
        return [_("a non-empty mapping such as {example}", example=f"{{{example}}}")]
    return ["null" if kind == "null" else _("a mapping")]


TEXTS: tuple[tuple[str, Mapping[str, str], str], ...] = (
    ("integer", {"least": "minimum", "most": "maximum"}, N_("a whole number from {least} to {most}")),
    ("integer", {}, N_("a whole number")),
    ("number", {"least": "exclusiveMinimum", "most": "maximum"}, N_("a number above {least} up to {most}")),
    ("number", {"least": "minimum", "most": "maximum"}, N_("a number from {least} to {most}")),
    ("number", {}, N_("a number")),
    ("string", {"example": "examples"}, N_("a string such as {example}")),
    ("string", {"least": "minLength", "most": "maxLength"}, N_("a string of {least} to {most} characters")),
    ("string", {}, N_("a string")),
    ("object", {"most": "maxProperties"}, N_("a mapping with at most {most} keys")),
)
"""Types of JSON Schema, the keywords that a schema has, and the description of its values. The first row counts."""


def _problems(root: Schema, data: object, kinds: Mapping[KeyPath, str], file: str) -> list[SpecError]:
    """Return an error for each problem that pydantic found, unknown keys first.

    `kinds`: pydantic's type of error for each key path. A section's error is skipped if one of its keys has an error,
    and that of a missing key if an unknown key is similar to it.
    """
    sections = {path[:size] for path in kinds for size in range(len(path))}
    paths = [path for path in kinds if path not in sections and kinds[path] != "rule"]
    paths.sort(key=lambda path: kinds[path] != "extra_forbidden")
    errors: list[SpecError] = []
    suggested: set[KeyPath] = set()
    for path in paths:
        if path in suggested:
            continue
        if len(errors) == MAX_PROBLEMS:
            text = _("has {count} more problems", count=len(paths) - MAX_PROBLEMS)
            errors.append(spec_error((), text, file=file))
            break
        if kinds[path] == "missing":
            value, problem = None, _("is missing")
            fix = _("give {values}", values=describe(_schema_at(root, path), root))
        elif kinds[path] == "extra_forbidden":
            value, problem = _value_at(data, path), _("is not a known key")
            value = None if isinstance(value, (dict, list)) else value
            fix, name = _suggest_key(root, path)
            suggested.add((*path[:-1], name))
        else:
            value, schema = _value_at(data, path), _schema_at(root, path)
            text = N_("is null but must be {values}") if value is None else N_("must be {values}")
            problem = _(text, values=describe(schema, root))
            fix = _hint(value, list(_alternatives(schema, root)))
        errors.append(spec_error(path, problem, value=value, fix=fix, file=file))
    return errors


def _in_data(data: object, location: tuple[int | str, ...]) -> KeyPath:
    """Return the path in `data` for a pydantic error location, without pydantic's names of union branches."""
    path: KeyPath = ()
    for part in location:
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            path, data = (*path, part), data[part]  # type: ignore[index]
    return path


def _value_at(data: Any, path: KeyPath) -> object:
    for part in path:
        data = data[part]
    return data


def _alternatives(schema: Schema, root: Schema) -> Iterator[Schema]:
    if "$ref" in schema:
        yield from _alternatives(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in schema:
        for part in schema["anyOf"]:
            yield from _alternatives(part, root)
    else:
        yield schema


def _schema_at(root: Schema, path: KeyPath) -> Schema:
    schema = root
    for part in path:
        for option in _alternatives(schema, root):
            if isinstance(part, int) and "items" in option:
                schema = option["items"]
            elif part in option.get("properties", {}):
                schema = option["properties"][part]
            elif values := [*option.get("patternProperties", {}).values(), option.get("additionalProperties")]:
                schema = next((each for each in values if isinstance(each, Mapping)), schema)
    return schema


def _suggest_key(root: Schema, path: KeyPath) -> tuple[str, str]:
    """Return a hint for an unknown key, and the key of the same section that was probably meant, or an empty string."""
    name, known = str(path[-1])[:64], [key for key, _ in keys_of(root, root)]
    options = _alternatives(_schema_at(root, path[:-1]), root)
    section_keys = [key for each in options for key in each.get("properties", {})]
    same_name = [key for key in known if key[-1] == name]
    if same_name:
        sections = _join_with_or([key_text(key[:-1]) for key in same_name[:2]])
        return _("it belongs under {section}", section=sections), ""
    if close := _keys_like(name, section_keys):
        return _(DID_YOU_MEAN, name=close[0]), close[0]
    if close_key := closest(name, [str(key[-1]) for key in known], cutoff=0.8):
        return _(DID_YOU_MEAN, name=key_text(next(key for key in known if key[-1] == close_key))), close_key
    listed = section_keys if len(section_keys) <= 20 else [*section_keys[:7], "...", *section_keys[-3:]]
    return _("known keys: {names}", names=", ".join(listed)), ""


def _keys_like(name: str, keys: list[str]) -> list[str]:
    """Return the keys that a name may mean: an alias, initials, the starts of their words, or similar letters."""
    if aliased := [key for key in keys if name.lower() in (*ALIASES.get(key, ()), *_initials(key))]:
        return aliased
    words = "[a-z0-9]*_(model_)?".join(map(re.escape, re.split("[-_]", name.lower())))
    for start in ("^", "(^|_)"):  # tensor_parallel: tensor_model_parallel_size; dist-opt: use_distributed_optimizer
        shortened = [key for key in keys if re.search(start + words, key)]
        if len(shortened) == 1:
            return shortened
    cutoff = 0.6 if max(map(len, keys), default=0) > 4 else 1.0  # short keys such as p50 are all similar
    return [*filter(None, [closest(name, keys, cutoff)])]


def _initials(key: str) -> tuple[str, ...]:
    """Return abbreviations of a key by its initials: `tmps`, `tps` and `tp` for `tensor_model_parallel_size`."""
    words = key.split("_")
    without_model = [word for word in words if word != "model"]
    return tuple("".join(word[0] for word in each if word) for each in (words, without_model, without_model[:-1]))


def _hint(value: object, options: list[Schema]) -> str:
    """Return how to fix a value that is almost valid, or an empty string if there is no suggestion. `options`: the
    alternatives of the value's JSON Schema."""
    if value is None:
        return _("give a value, or remove the key")
    if all("items" in option for option in options) and isinstance(value, (bool, int, float, str)):
        return _("write a list: [{values}]", values=", ".join(str(value).split()))
    options = [*options, *(option["items"] for option in options if "items" in option)]
    return _hint_of_text(value, options) if isinstance(value, str) else _hint_of_number(value, options)


def _hint_of_number(value: object, options: list[Schema]) -> str:
    numbers = [each for each in options if each.get("type") == "integer"]
    limits = [(each.get("minimum", value), each.get("maximum", value)) for each in numbers]
    if isinstance(value, float) and value.is_integer() and any(low <= value <= high for low, high in limits):
        return _("write {value}", value=int(value))
    accepts_text = any("maxLength" in option and "examples" not in option for option in options)
    return _("quote it") if accepts_text and isinstance(value, (bool, int, float)) else _hint_of_unit(value, options)


YES, NO = ("true", "yes", "on"), ("false", "no", "off")


def _hint_of_text(value: str, options: list[Schema]) -> str:
    types, low = {option.get("type") for option in options}, value.lower()
    if re.fullmatch(r"[-+]?\d{1,18}(\.\d+)?", value) and types & {"integer", "number"}:
        return _("write {value} without quotes", value=value)
    if low in (*YES, *NO) and "boolean" in types:
        return _("write {value} without quotes", value=YES[0] if low in YES else NO[0])
    if hint := _hint_of_unit(value, options):
        return hint
    words = [word for option in options for word in option.get("enum", [option.get("const")]) if word]
    close = closest(value[:64].lower(), words)
    return _(DID_YOU_MEAN, name=close) if close else ""


def _hint_of_unit(value: object, options: list[Schema]) -> str:
    units = [unit for option in options for unit in option.get("units", ())]
    amount = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z/]*)", str(value))
    if not units or amount is None:
        return ""
    given = re.sub(r"b(?=ps$|/s$)", "bit", amount[2]).replace("bitps", "bit/s")  # 400Gb/s and 400Gbps are bits
    close = [unit for unit in units if unit.lower() == given.lower()]
    if amount[2] in close:
        return _("use an amount in this range")
    return _(DID_YOU_MEAN, name=amount[1] + close[0]) if close else _("use a unit of {units}", units=", ".join(units))


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
ModelPath = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT, examples=["./Qwen3-8B"])]
Folder = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT, examples=["../training"])]


def _environment_of(envs: Mapping[str, str | int], _context: Context) -> dict[str, str]:
    problem, fix = _("is not the name of an environment variable"), _("use letters, digits and underscores")
    if invalid := [name for name in envs if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)]:
        raise join_errors([spec_error((name,), problem, fix=fix) for name in invalid])
    return {name: str(value) for name, value in envs.items()}


Envs = Annotated[dict[str, Value | int], rule(_environment_of)]
"""Environment variables by name. Validation checks the names."""
