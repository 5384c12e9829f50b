"""Redacts secrets such as keys, tokens and passwords. Secrets are found by name or by format.

The detection is not perfect: it misses secrets with unusual names, and redacts some harmless values.
"""

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus

REDACTED = "(left out)"
MIN_LENGTH = 6
"""The minimum length of a secret that is redacted wherever it occurs. Shorter values may be common words, so they are
redacted only next to their name."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_ENDS = (
    *("password", "passwort", "passwd", "passphrase", "passcode", "secret", "credential", "credentials", "cookie"),
    *("apikey", "accesskey", "secretkey", "privatekey", "authorization", "sshpass", "bearer", "jwt", "webhook"),
    *("webhook_url", "connection_string", "access_key_id", "secret_id", "pass_phrase", "auth_config", "auth_header"),
    "secret_key_base",
)
_SHORT_WORDS = _words("pw pwd pass pat cred creds sk ak auth sas")
"""Last words of names of secrets after the name of a service or a user (`db_pass`), or in capitals (`GITHUB_PAT`)."""
_ALONE = _words("pw PW Pwd PAT creds CREDS sk SK ak AK auth _auth")
"""Such words that are names of secrets by themselves. PWD is the working directory."""
_OWNERS = _words(
    "api access secret private signing encryption auth ssh account license sdk admin master root user client "
    "service app deploy session storage cloud registry webhook aws azure gcp google s3 oss cos obs minio hf "
    "basic modelscope modelarts huggingface openai anthropic ngc wandb comet neptune http swanlab clearml mlflow "
    "langfuse sentry github gitlab git docker npm pypi db database mysql postgres pg redis mongo kafka smtp mail "
    "ftp ldap proxy vault jwt hmac tls ssl rsa huawei huaweicloud volc volcengine aliyun alibaba tencent baidu "
    "qianfan subscription shared"
)
"""Words that show, before `key` or a short word in a name, that the name is about a secret."""
_TEXT_WORDS = _words(
    "bos eos pad unk sep cls mask eot eom image audio video special stop start end begin first last next new per "
    "each every one a the same input output prompt draft max min num total decode prefill forward backward "
    "public gpg sort primary foreign partition cache"
)
"""Words that show, before the last word of a name, that the name is not about a secret: `bos_token`, `FORWARD_PASS`."""
_QUALIFIERS = _words("prod dev test staging read write old backup default value b64 json")
"""Words that may follow the last word of a name, as a number may: `API_KEY_PROD`, `HF_TOKEN_2`."""
_GAP = r"[^\S\n]*"
_NAME = re.compile(
    rf"""(?P<line>^{_GAP}(?:(?:export|-)[ \t]+)?["']?)?(?<![\w.-])(?P<dash>--?)?"""
    r"""(?P<name>(?:(?i:api|access|secret|private)\ )?[A-Za-z_][\w.-]*)"""
    rf"""(?:\\*["']?\]?{_GAP}(?::=|=>|=|:(?!\?)){_GAP}(?:\n{_GAP}(?:-[ \t]+)?(?![\w.-]+["']?{_GAP}:))?"""
    rf"""|(?(dash)(?:["']{_GAP},{_GAP}|[ \t]+)(?!["']?-)|(?!)))""",
    re.MULTILINE,
)
"""A name before a value: of a key, a variable, an option or a parameter of a URL."""
_VALUE = re.compile(
    r"""(?!\(left out)(?:[A-Za-z_.]{0,20}\(?(?:\\+["']([^"'\\\n]*)|"((?:[^"\\\n]|\\.)*)|'((?:[^'\\\n]|\\.)*))"""
    r"""|\[([^\]\n]*)|\(([^)\n]*)|\{([^}\n]*)"""
    r"""|((?:(?:bearer|basic|token|apikey|digest|negotiate)[ \t]+)?[^\s,;)}\]'"{\[(][^\s,;)}\]'"]*))""",
    re.IGNORECASE,
)
_REST = re.compile(r"([^\s\"'{\[(][^\n]*)")
"""An unquoted value to the end of the line."""
_PARAMETER = re.compile(r"(?!\(left out)([^&\s'\"]+)")
_USER = re.compile(r"(?<![\w-])(?:-u|--(?:proxy-)?user)[ \t=]+['\"]?[^\s:'\"]+:(?!\d+\b|\(left out)([^\s'\"]+)")
"""The password of a user of an HTTP server, as for curl."""
_PATTERNS = (
    _USER,
    re.compile(  # a password, or a token instead of a user, in a URL
        r"[A-Za-z][A-Za-z0-9+.-]{0,30}://(?:[^/\s:@'\"]*:(?=[^/\s?#'\"]+@)|(?=[^/\s:@'\"]{16,}@))([^/\s?#'\"]+)(?=@)"
    ),
    re.compile(r"[?&](?:sig|signature|x-(?:amz|goog)-signature)=([^&\s'\"]{6,})", re.IGNORECASE),
    re.compile(r"\b(?i:bearer|basic)[ \t]+((?=[\w.~+/-]*(?:[\d=]|[a-z][A-Z]))[\w.~+/=-]{8,})"),
    re.compile(r"\blogin[ \t]+\S+[ \t]+password[ \t]+(?!\(left out)(\S+)"),  # a machine in a .netrc
    re.compile(  # the address of a webhook
        r"(?:hooks\.slack\.com/services/|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v\d/hook/"
        r"|qyapi\.weixin\.qq\.com/cgi-bin/webhook/send\?key=|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot"
        r"|\.office\.com/webhook(?:b2)?/)([^\s'\"<>]{6,})"
    ),
    re.compile(
        r"(?<![A-Za-z0-9])(hf_(?:oauth_)?[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|[ps]k-lf-[\w-]{16,}"
        r"|sk-(?:[a-z0-9]{2,8}-){0,3}\w{16,}[\w-]*|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
        r"|github_pat_\w{20,}|gl(?:pat|rt|dt)-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AKLT[A-Za-z0-9]{16,}"
        r"|LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{13,}|bce-v3/ALTAK-\w+/\w+|AIza[\w-]{35}|ya29\.[\w-]{20,}"
        r"|xox[abeprs]-[A-Za-z0-9-]{10,}|nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}|xai-[A-Za-z0-9]{20,}"
        r"|r8_[A-Za-z0-9]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dckr_pat_[\w-]{20,}|wandb_v1_\w{20,}"
        r"|ms-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|hvs\.[\w-]{20,}|lsv2_(?:pt|sk)_\w{20,}|glsa_\w{20,}"
        r"|pplx-[A-Za-z0-9]{32,}|rpa_[A-Z0-9]{30,}|tgp_v1_[\w-]{20,}|dapi[0-9a-f]{32}|dop_v1_[0-9a-f]{64}"
        r"|AGE-SECRET-KEY-1[A-Z0-9]{40,}|SG\.[\w-]{16,64}\.[\w-]{16,}"
        r"|(?<![\w-])eyJ[\w-]{10,2000}\.[\w-]{10,}\.[\w-]{5,}"
        r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?:[^-]|-(?!----))*)"
    ),
)
"""Patterns of secrets, which are their only group."""


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable, key or option is a secret.

    Its name denotes one, such as `HF_TOKEN`, `ADMIN_KEY` or `db.password`, not `max_tokens`, or its value contains one:
    a token of a known format, a password in a URL, or an option with a secret name.
    """
    return (_is_secret_name(name) and (not value or _is_value(value))) or any(_spans(value))


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    words = [word for word in re.split(r"[_. -]", re.sub(r"([a-z0-9])(?=[A-Z])", r"\1_", name)) if word]
    while len(words) > 1 and (words[-1].isdigit() or words[-1].lower() in _QUALIFIERS):
        words.pop()
    if not words:
        return False
    last, previous = words[-1].lower(), words[-2].lower() if len(words) > 1 else ""
    if last == "token":
        return previous not in _TEXT_WORDS
    if last in ("key", "keys") or last in _SHORT_WORDS:
        has_owner = previous in _OWNERS or (name.isupper() and previous not in {"", *_TEXT_WORDS})
        return has_owner or (len(words) == 1 and words[0] in _ALONE)
    return "_".join(words).lower().endswith(_SECRET_ENDS)


def secrets_in_data(data: Any) -> tuple[str, ...]:
    """Return the secrets in plain data such as a spec or the environment, the longest first.

    They are the values of keys with secret names, and secrets in commands and other texts.
    """
    values = {value for value in _walk(data) if len(value) >= MIN_LENGTH}
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def redact_text(text: str, known: Collection[str] = ()) -> str:
    """Return `text` with secrets replaced by REDACTED: the `known` ones, and those that are detected in the text."""
    for value in known:
        for form in _forms(value):
            text = text.replace(form, REDACTED)
    parts, end = list[str](), 0
    for start, stop in sorted(_spans(text, to_end=True)):
        if start >= end:
            parts += text[end:start], REDACTED
        end = max(end, stop)
    return "".join([*parts, text[end:]]) if parts else text


@lru_cache(maxsize=4096)
def _forms(secret: str) -> tuple[str, ...]:
    """Return how texts show a known secret: plain, as Python, JSON, a shell and a URL write it, and its lines."""
    forms = {secret, repr(secret)[1:-1], repr(f'"{secret}')[2:-1], json.dumps(secret)[1:-1], *secret.splitlines()}
    forms |= {json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe=""), quote_plus(secret)}
    forms = {each.strip() for each in (*forms, shlex.quote(secret).strip("'"))}
    return tuple(sorted((each for each in forms if len(each) >= MIN_LENGTH), key=len, reverse=True))


def redact_data(data: Any, known: Collection[str] = ()) -> Any:
    """Return plain data with secrets redacted: values of keys and of command-line options with secret names."""
    if data is None or isinstance(data, (int, float)):
        return data
    if isinstance(data, Mapping):
        return {key: redact_data(_under(str(key), value), known) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        if all(isinstance(each, str) for each in data):
            return list(redact_arguments(data, known))
        return [redact_data(each, known) for each in data]
    if not isinstance(data, str):
        return data
    redacted = redact_text(data, known)
    return data if redacted == data else redacted  # return the Message itself, which can still be translated


def _under(key: str, value: Any) -> Any:
    """Return the value of a key, or REDACTED for it or each of its items if the key has a secret name."""
    if not _is_secret_name(key):
        return value
    if isinstance(value, (list, tuple)):
        return [_under(key, each) for each in value]
    return REDACTED if _is_value(value) else value


def redact_arguments(words: Sequence[str], known: Collection[str] = ()) -> Iterator[str]:
    """Yield the arguments of a command line with secrets redacted."""
    for word, value in zip(words, _secret_values(words), strict=True):
        yield redact_text(word.replace(value, REDACTED) if value else word, known)


def secrets_in_arguments(words: Sequence[str]) -> list[str]:
    """Return the secrets in a command line: values of options with secret names, passwords in URLs, and tokens."""
    secrets = [value for value in _secret_values(words) if value]
    for word, value in zip(words, _secret_values(words), strict=True):
        secrets += [] if value else [word[start:end] for start, end in _spans(word)]
    return list(dict.fromkeys(secrets))


def _walk(data: Any) -> Iterator[str]:
    """Yield the secrets in plain data: values of keys with secret names, and secrets in command lines."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if _is_secret_name(str(key)) and _is_value(each):
                    yield str(each)
            yield from _walk(value)
    elif isinstance(data, (list, tuple)):
        yield from secrets_in_arguments([str(each) for each in data if isinstance(each, (str, int, float))])
        for each in data:
            if not isinstance(each, str):
                yield from _walk(each)
    elif isinstance(data, str):
        for start, end in _spans(data):
            yield data[start:end]


def _secret_values(words: Sequence[str]) -> Iterator[str]:
    """Yield, for each argument, the part that is the value of an option with a secret name, or an empty string."""
    is_value_expected, option, previous = False, "", ""
    several = re.compile(r"--api[_-]?keys?$")  # servers may take several of them
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)
        has_secret_name = bool(re.fullmatch(r"-{0,2}[A-Za-z_][\w.-]*", name)) and _is_secret_name(name)
        if is_value_expected and not is_option:
            yield word
        elif user := _USER.fullmatch(f"{previous} {word}"):
            yield user[1]
        else:
            yield value if equals and has_secret_name else ""
        if is_option or not several.match(option):
            is_value_expected, option = is_option and has_secret_name and not equals, name
        previous = word


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
    for each in _PATTERNS:
        yield from (found.span(1) for found in each.finditer(text) if REDACTED not in found[1])


def _is_found(name: str, value: str) -> bool:
    """Return whether a text after a secret name is a secret, not a number of a token or what is already redacted."""
    is_number = name.lower().endswith("token") and re.fullmatch(r"[\d.]+", value)
    return _is_value(re.split(r"[\s,;]", value, maxsplit=1)[0].strip("\"'")) and REDACTED not in value and not is_number


def _is_value(value: object) -> bool:
    """Return whether the value of a key may be a secret: not a switch, nor a reference to a variable such as $TOKEN."""
    if isinstance(value, bool) or value is None or isinstance(value, (Mapping, list, tuple)):
        return False
    if re.match(r"\$(?:\{[A-Za-z_]|[A-Z_][A-Z0-9_]*$)", str(value)):
        return False
    return str(value) not in ("", "0", "1", "None", "none", "null", "True", "true", "False", "false", "{", "[")
