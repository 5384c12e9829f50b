"""What must not be handed on: values of keys, tokens and passwords, known by the name that they have or by their form.

It is a net, not a proof: a secret under an innocent name passes, and some harmless values are left out with the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

LEFT_OUT = "(left out)"
SHORTEST = 6
"""Characters of a value at the least that is left out wherever it stands: shorter ones may mean something else."""

_ENDS = (
    "password",
    "passwort",
    "passwd",
    "passphrase",
    "secret",
    "apikey",
    "credential",
    "credentials",
    "authorization",
)
_KEYS = frozenset(("api", "access", "secret", "private", "signing", "encryption", "auth", "ssh", "account", "license"))
_NO_SECRETS = frozenset(
    (
        *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "image", "audio", "video", "special", "stop"),
        *("start", "end", "begin", "first", "last", "next", "new", "per", "each", "every", "one", "a", "the", "same"),
        *("input", "output", "prompt", "draft", "max", "min", "num", "total", "decode", "prefill"),
    )
)
"""Words before `token` that speak of text: `bos_token`, `time_per_token`."""
_VALUE = r"""(?!\(left out\)|["']\(left out\))(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[^\s,;)}\]'"]+)"""
_LINE = re.compile(r"""^(\s*(?:export\s+|-\s+)?["']?([A-Za-z_][\w.-]*)["']?\s*[:=]\s*)(\S.*)$""", re.MULTILINE)
_PAIR = re.compile(rf"""((?<![\w.-])-{{0,2}}([A-Za-z_][\w.-]*)["']?\s*[:=]\s*(?:\[|\((?!left out))?)({_VALUE})""")
_FLAG = re.compile(rf"""((?<![\w-])--?([A-Za-z][\w-]*)(?:["']\s*,\s*|[ \t]+))((?!["']?-){_VALUE})""")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://[^/\s:@'\"]*:)([^/\s@'\"]+)(?=@)")
_BEARER = re.compile(r"(\b(?:bearer|basic)\s+)([A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
_FORMS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)


def is_secret(name: str) -> bool:
    """Return whether what is called so is a secret: `HF_TOKEN`, `--api-key`, `db.password`, not `max_tokens`."""
    words = [
        word for word in re.split(r"[_.]+", re.sub(r"([a-z0-9])(?=[A-Z])", r"\1_", name).replace("-", "_")) if word
    ]
    if not words:
        return False
    last, before = words[-1].lower(), words[-2].lower() if len(words) > 1 else ""
    if last == "token":
        return before not in _NO_SECRETS
    return last.endswith(_ENDS) or last == "authorization" or (last == "key" and before in _KEYS)


def secrets_of(named: Mapping[str, object]) -> tuple[str, ...]:
    """Return the values of an environment that are secrets, long ones first."""
    found = {str(value) for name, value in named.items() if is_secret(name) and len(str(value)) >= SHORTEST}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def secrets_within(data: Any) -> tuple[str, ...]:
    """Return the secrets in plain data, such as a spec: by their keys, and in the words of command lines."""
    return tuple(dict.fromkeys(value for value in _within(data) if len(value) >= SHORTEST))


def without_secrets(text: str, known: Collection[str] = ()) -> str:
    """Return text in which `(left out)` stands for each secret: for `known` ones, by its name, or by its form."""
    for value in known:
        text = text.replace(value, LEFT_OUT)
    text = _LINE.sub(lambda found: _told(found, whole=True), text)
    text = _PAIR.sub(_told, text)
    text = _FLAG.sub(_told, text)
    text = _URL.sub(rf"\1{LEFT_OUT}", text)
    text = _BEARER.sub(rf"\1{LEFT_OUT}", text)
    return _FORMS.sub(LEFT_OUT, text)


def plain_without_secrets(data: Any, known: Collection[str] = ()) -> Any:
    """Return plain data, mappings and sequences of it, without secrets: values by their key, words by the option."""
    if isinstance(data, Mapping):
        return {
            key: LEFT_OUT if is_secret(str(key)) and _is_value(value) else plain_without_secrets(value, known)
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        if all(isinstance(each, str) for each in data):
            return list(words_without_secrets(data, known))
        return [plain_without_secrets(each, known) for each in data]
    return without_secrets(data, known) if isinstance(data, str) else data


def words_without_secrets(words: Sequence[str], known: Collection[str] = ()) -> Iterator[str]:
    """Yield the words of a command line without secrets."""
    for word, value in zip(words, _values(words), strict=True):
        yield without_secrets(word.replace(value, LEFT_OUT) if value else word, known)


def secrets_in(words: Sequence[str]) -> list[str]:
    """Return the secrets in the words of a command line: the values of options, and passwords in URLs."""
    found = [value for value in _values(words) if value]
    found += [part[2] for word in words for part in _URL.finditer(word)]
    return list(dict.fromkeys(found))


def _within(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        for key, value in data.items():
            if is_secret(str(key)) and _is_value(value):
                yield str(value)
            else:
                yield from _within(value)
    elif isinstance(data, (list, tuple)):
        yield from secrets_in([str(each) for each in data if isinstance(each, (str, int, float))])
        for each in data:
            if not isinstance(each, str):
                yield from _within(each)
    elif isinstance(data, str):
        yield from secrets_in(data.split())


def _values(words: Sequence[str]) -> Iterator[str]:
    """Yield, a word of a command line, what of it is the value of a secret option, "" for nothing."""
    expected = False
    for word in words:
        name, equals, value = word.partition("=")
        option = word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)
        secret = bool(re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", name)) and is_secret(name)
        if expected and not option:
            yield word
        else:
            yield value if equals and secret else ""
        expected = option and secret and not equals


def _told(found: re.Match[str], *, whole: bool = False) -> str:
    before, name, value = found[1], found[2], found[3]
    first = re.split(r"[\s,;]", value, maxsplit=1)[0].strip("\"'")
    if not is_secret(name) or LEFT_OUT in value or not _is_value(first):
        return found[0]
    if name.lower().endswith("token") and re.fullmatch(r"[\d.]+", value.strip("\"',;")):
        return found[0]  # the number of a token
    if whole or value[0] not in "\"'":
        return before + LEFT_OUT
    return f"{before}{value[0]}{LEFT_OUT}{value[0]}"


def _is_value(value: object) -> bool:
    """Return whether there is something to hide."""
    if isinstance(value, bool) or value is None or isinstance(value, (Mapping, list, tuple)):
        return False
    return str(value) not in ("", "None", "none", "null", "True", "true", "False", "false", "{", "[")
