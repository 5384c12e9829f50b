"""Redacts secrets such as keys, tokens and passwords. Secrets are found by name or by format.

The detection is not perfect: it misses secrets with unusual names, and redacts some harmless values.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

REDACTED = "(left out)"
MIN_LENGTH = 6
"""The minimum length of a secret that is redacted wherever it occurs. Shorter values may be common words, so they are
redacted only next to their name."""

_SECRET_SUFFIXES = (
    *("password", "passwort", "passwd", "passphrase", "secret", "apikey", "credential", "credentials"),
    "authorization",
)
_KEY_PREFIXES = frozenset(
    ("api", "access", "secret", "private", "signing", "encryption", "auth", "ssh", "account", "license")
)
_TEXT_WORDS = frozenset(
    (
        *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "image", "audio", "video", "special", "stop"),
        *("start", "end", "begin", "first", "last", "next", "new", "per", "each", "every", "one", "a", "the", "same"),
        *("input", "output", "prompt", "draft", "max", "min", "num", "total", "decode", "prefill"),
    )
)
"""Words that show, before `token` in a name, that the name is not about a secret: `bos_token`, `time_per_token`."""
_VALUE = r"""(?!\(left out\)|["']\(left out\))(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[^\s,;)}\]'"]+)"""
_LINE = re.compile(r"""^(\s*(?:export\s+|-\s+)?["']?([A-Za-z_][\w.-]*)["']?\s*[:=]\s*)(\S.*)$""", re.MULTILINE)
_PAIR = re.compile(rf"""((?<![\w.-])-{{0,2}}([A-Za-z_][\w.-]*)["']?\s*[:=]\s*(?:\[|\((?!left out))?)({_VALUE})""")
_FLAG = re.compile(rf"""((?<![\w-])--?([A-Za-z][\w-]*)(?:["']\s*,\s*|[ \t]+))((?!["']?-){_VALUE})""")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://[^/\s:@'\"]*:)([^/\s@'\"]+)(?=@)")
_BEARER = re.compile(r"(\b(?:bearer|basic)\s+)([A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
_TOKEN_FORMATS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Return whether a name denotes a secret, such as `HF_TOKEN`, `ADMIN_KEY` or `db.password`, not `max_tokens`."""
    words = [
        word for word in re.split(r"[_.]+", re.sub(r"([a-z0-9])(?=[A-Z])", r"\1_", name).replace("-", "_")) if word
    ]
    if not words:
        return False
    last, previous = words[-1].lower(), words[-2].lower() if len(words) > 1 else ""
    if last == "token":
        return previous not in _TEXT_WORDS
    is_key = previous in _KEY_PREFIXES or (name.isupper() and previous not in {"", *_TEXT_WORDS})
    return last.endswith(_SECRET_SUFFIXES) or (last in ("key", "keys") and is_key)


def secrets_in_environment(environment: Mapping[str, object]) -> tuple[str, ...]:
    """Return the values of environment variables with secret names, the longest first."""
    values = {str(value) for name, value in environment.items() if is_secret(name) and len(str(value)) >= MIN_LENGTH}
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def secrets_in_data(data: Any) -> tuple[str, ...]:
    """Return the secrets in plain data such as a spec: values of keys with secret names, and secrets in commands."""
    return tuple(dict.fromkeys(value for value in _walk(data) if len(value) >= MIN_LENGTH))


def redact_text(text: str, known: Collection[str] = ()) -> str:
    """Return `text` with secrets replaced by REDACTED: the `known` ones, and those that are detected in the text."""
    for value in known:
        text = text.replace(value, REDACTED)
    text = _LINE.sub(lambda match: _redact_match(match, whole_line=True), text)
    text = _PAIR.sub(_redact_match, text)
    text = _FLAG.sub(_redact_match, text)
    text = _URL.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    return _TOKEN_FORMATS.sub(REDACTED, text)


def redact_data(data: Any, known: Collection[str] = ()) -> Any:
    """Return plain data with secrets redacted: values of keys and of command-line options with secret names."""
    if data is None or isinstance(data, (int, float)):
        return data
    if isinstance(data, Mapping):
        return {
            key: REDACTED if is_secret(str(key)) and _is_value(value) else redact_data(value, known)
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        if all(isinstance(each, str) for each in data):
            return list(redact_arguments(data, known))
        return [redact_data(each, known) for each in data]
    if not isinstance(data, str):
        return data
    redacted = redact_text(data, known)
    return data if redacted == data else redacted  # return the Message itself, which can still be translated


def redact_arguments(words: Sequence[str], known: Collection[str] = ()) -> Iterator[str]:
    """Yield the arguments of a command line with secrets redacted."""
    for word, value in zip(words, _secret_values(words), strict=True):
        yield redact_text(word.replace(value, REDACTED) if value else word, known)


def secrets_in_arguments(words: Sequence[str]) -> list[str]:
    """Return the secrets in a command line: values of options with secret names, and passwords in URLs."""
    secrets = [value for value in _secret_values(words) if value]
    secrets += [part[2] for word in words for part in _URL.finditer(word)]
    return list(dict.fromkeys(secrets))


def _walk(data: Any) -> Iterator[str]:
    """Yield the secrets in plain data: values of keys with secret names, and secrets in command lines."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if is_secret(str(key)) and _is_value(value):
                yield str(value)
            else:
                yield from _walk(value)
    elif isinstance(data, (list, tuple)):
        yield from secrets_in_arguments([str(each) for each in data if isinstance(each, (str, int, float))])
        for each in data:
            if not isinstance(each, str):
                yield from _walk(each)
    elif isinstance(data, str):
        yield from secrets_in_arguments(data.split())


def _secret_values(words: Sequence[str]) -> Iterator[str]:
    """Yield, for each argument, the part that is the value of an option with a secret name, or an empty string."""
    is_value_expected = False
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)
        has_secret_name = bool(re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", name)) and is_secret(name)
        if is_value_expected and not is_option:
            yield word
        else:
            yield value if equals and has_secret_name else ""
        is_value_expected = is_option and has_secret_name and not equals


def _redact_match(match: re.Match[str], *, whole_line: bool = False) -> str:
    prefix, name, value = match[1], match[2], match[3]
    first_word = re.split(r"[\s,;]", value, maxsplit=1)[0].strip("\"'")
    if not is_secret(name) or REDACTED in value or not _is_value(first_word):
        return match[0]
    if name.lower().endswith("token") and re.fullmatch(r"[\d.]+", value.strip("\"',;")):
        return match[0]  # a number such as a token id is not a secret
    if whole_line or value[0] not in "\"'":
        return prefix + REDACTED
    return f"{prefix}{value[0]}{REDACTED}{value[0]}"


def _is_value(value: object) -> bool:
    if isinstance(value, bool) or value is None or isinstance(value, (Mapping, list, tuple)):
        return False
    return str(value) not in ("", "None", "none", "null", "True", "true", "False", "false", "{", "[")
