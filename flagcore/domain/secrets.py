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
    *("password", "passwort", "passwd", "passphrase", "passcode", "secret", "apikey", "credential", "credentials"),
    "authorization",
)
_SHORT_WORDS = frozenset(("pw", "pwd", "pass", "pat", "cred", "creds"))
"""Last words of names of secrets after the name of a service or a user (`db_pass`), or in capitals (`GITHUB_PAT`)."""
_ALONE = frozenset(("pw", "PW", "PAT", "creds", "CREDS"))
"""Such words that are names of secrets by themselves. PWD is the working directory."""
_OWNERS = frozenset(
    (
        *("api", "access", "secret", "private", "signing", "encryption", "auth", "ssh", "account", "license"),
        *("admin", "master", "root", "user", "client", "service", "app", "deploy", "session", "storage"),
        *("registry", "webhook", "aws", "azure", "gcp", "google", "s3", "oss", "cos", "minio", "hf", "huggingface"),
        *("modelscope", "openai", "anthropic", "ngc", "wandb", "comet", "neptune", "swanlab", "clearml", "mlflow"),
        *("langfuse", "sentry", "github", "gitlab", "git", "docker", "npm", "pypi", "db", "database", "mysql"),
        *("postgres", "pg", "redis", "mongo", "kafka", "smtp", "mail", "ftp", "ldap", "proxy", "vault", "jwt"),
        *("hmac", "tls", "ssl", "rsa"),
    )
)
"""Words that show, before `key` or a short word in a name, that the name is about a secret."""
_TEXT_WORDS = frozenset(
    (
        *("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "eom", "image", "audio", "video", "special"),
        *("stop", "start", "end", "begin", "first", "last", "next", "new", "per", "each", "every", "one", "a"),
        *("the", "same", "input", "output", "prompt", "draft", "max", "min", "num", "total", "decode", "prefill"),
        *("forward", "backward"),
    )
)
"""Words that show, before the last word of a name, that the name is not about a secret: `bos_token`, `FORWARD_PASS`."""
_SCHEME = r"(?:(?:bearer|basic|token)[ \t]+)?"
_VALUE = (
    r"""(?!\(left out\)|["']\(left out\))(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[^\s,;)}\]'"{\[][^\s,;)}\]'"]*)"""
)
_GAP = r"[^\S\n]*"
_LINE = re.compile(
    rf"""^({_GAP}(?:export{_GAP}(?<=\s)|-{_GAP}(?<=\s))?["']?([A-Za-z_][\w.-]*)["']?{_GAP}[:=]{_GAP})(\S.*)$""",
    re.MULTILINE,
)
_PAIR = re.compile(
    rf"""((?<![\w.-])-{{0,2}}([A-Za-z_][\w.-]*)["']?{_GAP}[:=](?:{_GAP}\n)?{_GAP}(?:\[|\((?!left out))?)"""
    rf"""({_SCHEME}{_VALUE})""",
    re.IGNORECASE,
)
_FLAG = re.compile(
    rf"""((?<![\w-])--?([A-Za-z][\w-]*)(?:["']{_GAP},{_GAP}|[ \t]+))((?!["']?-){_SCHEME}{_VALUE})""", re.IGNORECASE
)
_URL = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]{0,30}://(?:[^/\s:@'\"]*:(?=[^/\s@'\"]+@)|(?=[^/\s:@'\"]{16,}@)))([^/\s@'\"]+)(?=@)"
)
_QUERY = re.compile(r"([?&](?:sig|signature|x-(?:amz|goog)-signature)=)([^&\s'\"]{6,})", re.IGNORECASE)
_BEARER = re.compile(r"(\b(?:bearer|basic)[ \t]+)([A-Za-z0-9._~+/=-]{8,})", re.IGNORECASE)
_TOKEN_FORMATS = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|rt|dt)-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{13,}|AIza[\w-]{35}|ya29\.[\w-]{20,}|xox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}|xai-[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{30,}|dckr_pat_[\w-]{20,}|SG\.[\w-]{16,64}\.[\w-]{16,}|wandb_v1_\w{20,}|hooks\.slack\.com/services/[\w/]+"
    r"|(?<![\w-])eyJ[\w-]{10,2000}\.[\w-]{10,}\.[\w-]{5,}|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]*)"
)


_AFTER_PREFIX = (_URL, _QUERY, _BEARER)
"""Patterns of secrets after a prefix, which is their first group."""


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable, key or option is a secret.

    Its name denotes one, such as `HF_TOKEN`, `ADMIN_KEY` or `db.password`, not `max_tokens`, or its value contains one:
    a token of a known format, a password in a URL, or an option with a secret name.
    """
    return _is_secret_name(name) or bool(value and any(secrets_in_arguments(value.split())))


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    words = [
        word for word in re.split(r"[_.]+", re.sub(r"([a-z0-9])(?=[A-Z])", r"\1_", name).replace("-", "_")) if word
    ]
    if not words:
        return False
    last, previous = words[-1].lower(), words[-2].lower() if len(words) > 1 else ""
    if last == "token":
        return previous not in _TEXT_WORDS
    if last in ("key", "keys") or last in _SHORT_WORDS:
        has_owner = previous in _OWNERS or (name.isupper() and previous not in {"", *_TEXT_WORDS})
        return has_owner or (len(words) == 1 and words[0] in _ALONE)
    return last.endswith(_SECRET_SUFFIXES) or (last == "url" and previous == "webhook")


def secrets_in_data(data: Any) -> tuple[str, ...]:
    """Return the secrets in plain data such as a spec or the environment, the longest first.

    They are the values of keys with secret names, and secrets in commands and other texts.
    """
    values = {value for value in _walk(data) if len(value) >= MIN_LENGTH}
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def redact_text(text: str, known: Collection[str] = ()) -> str:
    """Return `text` with secrets replaced by REDACTED: the `known` ones, and those that are detected in the text."""
    for value in known:
        text = text.replace(value, REDACTED)
    text = _LINE.sub(lambda match: _redact_match(match, whole_line=True), text)
    text = _PAIR.sub(_redact_match, text)
    text = _FLAG.sub(_redact_match, text)
    for pattern in _AFTER_PREFIX:
        text = pattern.sub(rf"\1{REDACTED}", text)
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
    """Return the secrets in a command line: values of options with secret names, passwords in URLs, and tokens."""
    secrets = [value for value in _secret_values(words) if value]
    for word in words:
        secrets += [part[2] for pattern in _AFTER_PREFIX for part in pattern.finditer(word)]
        secrets += [part[0] for part in _TOKEN_FORMATS.finditer(word)]
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
    if not is_secret(name) or value.strip("\"',; ") == REDACTED or not _is_value(first_word):
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
