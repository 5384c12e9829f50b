"""Redacts secrets such as keys, tokens and passwords, which the table in `secrets.txt` tells from other text.

The detection is not perfect: it misses secrets with unusual names, and redacts some harmless values.
"""

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from itertools import chain
from typing import Any
from urllib.parse import quote, quote_plus

REDACTED = "(left out)"
MIN_LENGTH = 6
"""The minimum length of a secret that is redacted wherever it occurs. Shorter values may be common words, so they are
redacted only next to their name."""
_TEXT = re.sub(r"(?m)^#.*\n", "", files(__package__).joinpath("secrets.txt").read_text("utf-8"))
_PARTS = dict(re.findall(r"(?ms)^\[(\w+)\]\n(.*?)\n*(?=^\[\w+\]$|\Z)", _TEXT))
"""The parts of `secrets.txt`, which describes them."""
_WORDS = {part: frozenset(text.split()) for part, text in _PARTS.items()}
_ENDS, _NO_ENDS = tuple(_WORDS["ends"]), tuple(_WORDS["no_ends"])
_GLUED = rf"(?:{'|'.join(_WORDS['owners'])}){{1,3}}(?:tokens?|keys?|{'|'.join(_WORDS['short'])})"
"""A name without a separator, such as `DBPASS`."""
_ROWS = [[part.split() for part in row.split(":", 2)] for row in _PARTS["commands"].splitlines()]
_PROGRAMS = frozenset(name for names, _verbs, _kinds in _ROWS for name in names)
_COMMAND, _WORD, _NAME, _SCHEME, _VALUE, _REST, _PARAMETER, _PAIR, _REFERENCE = (
    re.compile(text.replace("\n", "").replace("PROGRAM", "|".join(_PROGRAMS)), re.MULTILINE)
    for text in re.split(r"\n{2,}", _PARTS["places"])
)
_FORMATS = [text.replace("\n", "") for text in re.split(r"\n{2,}", _PARTS["formats"])]


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable, key or option is a secret.

    Its name denotes one, such as `HF_TOKEN`, `ADMIN_KEY` or `db.password`, not `max_tokens`, or its value contains one:
    a token of a known format, a password in a URL, or an option with a secret name.
    """
    return (_is_secret_name(name) and (not value or _is_value(value, name))) or any(_spans(value))


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    joined = re.sub(r"([a-z0-9])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\2_", name)
    words = [word for word in re.split(r"[_. -]", joined) if word]
    while len(words) > 1 and (words[-1].isdigit() or words[-1].lower() in _WORDS["qualifiers"]):
        words.pop()
    if not words:
        return False
    last, previous = words[-1].lower().rstrip("0123456789"), words[-2].lower() if len(words) > 1 else ""
    glued = re.fullmatch(rf"(\w*?)(?:{'|'.join(_WORDS['glued'])}{'|key' if name.isupper() else ''})", last)
    if glued and (glued[1] or previous or last == "token") not in _WORDS["no_glued"] | _WORDS["of_text"] | {False}:
        return True
    if last in ("key", "keys") or last in _WORDS["short"]:
        has_owner = previous in _WORDS["owners"] or (name.isupper() and previous not in {"", *_WORDS["of_text"]})
        return has_owner or (len(words) == 1 and words[0] in _WORDS["alone"])
    joined = "_".join([*words[:-1], last]).lower()
    return not joined.endswith(_NO_ENDS) and bool(joined.endswith(_ENDS) or re.fullmatch(_GLUED, last))


def secrets_in_data(data: Any) -> tuple[str, ...]:
    """Return the secrets in plain data such as a spec or the environment, the longest first.

    They are the values of keys with secret names, and secrets in commands and other texts.
    """
    values = {value for value in _walk(data) if len(value) >= MIN_LENGTH}
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def redact_text(text: str, known: Collection[str] = ()) -> str:
    """Return `text` with secrets replaced by REDACTED: the `known` ones, and those that are detected in the text."""
    for value in known:
        for form in _written(value):
            text = text.replace(form, REDACTED)
    parts, end = list[str](), 0
    for start, stop in sorted(_spans(text, to_end=True)):
        parts += (text[end:start], REDACTED) if start >= end else ()
        end = max(end, stop)
    return "".join([*parts, text[end:]]) if parts else text


@lru_cache(maxsize=4096)
def _written(secret: str) -> tuple[str, ...]:
    """Return how texts show a known secret: plain, as Python, JSON, a shell and a URL write it, and its lines."""
    forms = {secret, repr(secret)[1:-1], repr(f'"{secret}')[2:-1], json.dumps(secret)[1:-1], *secret.splitlines()}
    forms |= {json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe=""), quote_plus(secret)}
    forms = {each.strip() for each in (*forms, shlex.quote(secret).strip("'"))}
    return tuple(sorted((each for each in forms if len(each) >= MIN_LENGTH), key=len, reverse=True))


def redact_data(data: Any, known: Collection[str] = ()) -> Any:
    """Return plain data with secrets redacted: values of keys and of command-line options with secret names."""
    if isinstance(data, Mapping):
        return {key: redact_data(_under(_name_of(key, data), value), known) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        if all(isinstance(each, str) for each in data):
            return list(redact_arguments(data, known))
        return [redact_data(each, known) for each in data]
    redacted = redact_text(data, known) if isinstance(data, str) else data
    return data if redacted == data else redacted  # return the Message itself, which can still be translated


def _name_of(key: object, data: Mapping[Any, Any]) -> str:
    """Return the name of the value at a key, which manifests of Kubernetes write beside it."""
    return str(data.get("name", key) if key == "value" else key)


def _under(name: str, value: Any) -> Any:
    """Return a value, or REDACTED for it or each of its items if its name is a secret's."""
    if isinstance(value, (list, tuple)) and _is_secret_name(name):
        return [_under(name, each) for each in value]
    return REDACTED if _is_secret_name(name) and _is_value(value, name) else value


def redact_arguments(words: Sequence[str], known: Collection[str] = ()) -> Iterator[str]:
    """Yield the arguments of a command line with secrets redacted."""
    for word, value in zip(words, _secret_values(words), strict=True):
        yield redact_text(word.replace(value, REDACTED) if value else word, known)


def secrets_in_arguments(words: Sequence[str]) -> list[str]:
    """Return the secrets in a command line: values of options with secret names, passwords in URLs, and tokens."""
    pairs = zip(words, _secret_values(words), strict=True)
    found = ([value] if value else [word[start:end] for start, end in _spans(word)] for word, value in pairs)
    return list(dict.fromkeys(chain.from_iterable(found)))


def _walk(data: Any) -> Iterator[str]:
    """Yield the secrets in plain data: values of keys with secret names, and secrets in command lines."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            name = _name_of(key, data)
            values = value if isinstance(value, (list, tuple)) else (value,)
            yield from (str(each) for each in values if _is_secret_name(name) and _is_value(each, name))
            yield from _walk(value)
    elif isinstance(data, (list, tuple)):
        yield from secrets_in_arguments([str(each) for each in data if isinstance(each, (str, int, float))])
        yield from chain.from_iterable(_walk(each) for each in data if not isinstance(each, str))
    elif isinstance(data, str):
        yield from (data[start:end] for start, end in _spans(data))


def _secret_values(words: Sequence[str]) -> Iterator[str]:
    """Yield, for each argument, the part that its option's name or its program makes a secret, or an empty string."""
    rows = list[list[Any]]()  # the words that are expected, what is secret, and the number of arguments
    is_value_expected, option, last = False, "", [""]
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)
        has_secret_name = bool(re.fullmatch(r"-{0,2}[^\W\d][\w.-]*", name)) and _is_secret_name(name)
        for row in rows:
            row[2] += not (is_option or "://" in word or (equals and re.match(r"\w+=[^=]", word)))
        if is_value_expected and not is_option:
            name, value = option, word
        elif not (equals and has_secret_name):
            text = f"{(before := ' '.join(last)[-400:])} {word}"
            parts = (text[start:end] for at, start, end in _in_formats(text) if at < len(before) < start)
            value = next(filter(None, chain(parts, (_by_row(row, last[-1], word) for row in rows))), "")
        yield value if value and _is_value(value, name) else ""
        if (program := word.rpartition("/")[2]) in _PROGRAMS:
            rows = [[verbs, kinds, 0] for names, verbs, kinds in _ROWS if program in names]
        rows = [[(), row[1], 0] if word in row[0] else row for row in rows]
        if is_option or not re.match(r"--api[_-]?keys?$", option):  # servers may take several of them
            is_value_expected, option = is_option and has_secret_name and not equals, name
        last = [*last[-4:], word]


def _in_formats(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield where each format is found in a text, and the start and the end of its secret."""
    found = chain.from_iterable(re.finditer(pattern, text) for pattern in _FORMATS)
    return ((each.start(), *each.span(each.re.groups)) for each in found if REDACTED not in each[each.re.groups])


def _by_row(row: Sequence[Any], previous: str, word: str) -> str:
    """Return the secret part of an option or of the N-th argument of a program, by a row of the table."""
    verbs, kinds, arguments = row
    for each in () if verbs else kinds:
        kind, _tilde, before = each.partition("~")
        option, is_next = kind.rstrip("+*"), previous == kind.rstrip("*") and not word.startswith("-")
        is_named = kind == "@name" and previous[:1] != "$" and _is_secret_name(previous)
        if is_next or is_named or kind == f"@{arguments}":
            value = word
        elif word.startswith(f"{option}=") or (kind != option and word.startswith(option)):
            value = word[len(option) :].removeprefix("=")
        else:
            continue
        if found := re.match(before, value):
            return value[found.end() :]
    return ""


def _in_commands(text: str, start: int = 0, *, is_inner: bool = False) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in the commands of a text, which is at `start` in another one."""
    for command in _COMMAND.finditer(text):
        places = [*_WORD.finditer(command[0])]
        words = [each[0] if REDACTED in each[0] else each[0].strip("\"'()[],") for each in places]
        for place, word, secret in zip(places, words, _secret_values(words), strict=True):
            at = start + command.start() + place.start() + place[0].index(word)
            if secret:
                yield at + word.rindex(secret), at + word.rindex(secret) + len(secret)
            elif " " in word and not is_inner:  # a command for another shell
                yield from _in_commands(word, at, is_inner=True)


def _spans(text: str, *, to_end: bool = False) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in a text. Spans may overlap.

    A value after a name at the start of a line may contain spaces. With `to_end`, this is also true for `NAME=value`,
    of which a shell reads only the first word.
    """
    end = 0
    for name in _NAME.finditer(text):
        if name.start() < end or not _is_secret_name(name["name"]):
            continue
        pattern = _PARAMETER if text[name.start() - 1 : name.start()] in ("?", "&") else _VALUE
        whole_line = name["line"] is not None and not name["dash"] and (to_end or not name[0].endswith("="))
        value = (_REST.match(text, name.end()) if whole_line else None) or pattern.match(text, name.end())
        if value and value.lastindex and _is_found(name["name"], value[value.lastindex]):
            yield value.span(value.lastindex)
            end = value.end()
    for pair in _PAIR.finditer(text):
        if pair.lastindex and _is_secret_name(pair[1]) and _is_found(pair[1], pair[pair.lastindex]):
            yield pair.span(pair.lastindex)
    yield from _in_commands(text)
    yield from ((start, end) for _at, start, end in _in_formats(text))


def _is_found(name: str, value: str) -> bool:
    """Return whether a text after a secret name is a secret, not what is already redacted."""
    return _is_value(re.split(r"[\s,;]", _SCHEME.sub("", value), maxsplit=1)[0].strip("\"'"), name)


def _is_value(value: object, name: str) -> bool:
    """Return whether a value after a secret name may be secret: not a switch, a reference or the number of a token."""
    if isinstance(value, bool) or value is None or isinstance(value, (Mapping, list, tuple)):
        return False
    text = str(value)
    is_number = name.lower().endswith("token") and re.fullmatch(r"[\d.]+", text)
    is_other = is_number or text.lower() in _WORDS["no_values"] or REDACTED in text or _REFERENCE.match(text)
    return bool(text) and not is_other
