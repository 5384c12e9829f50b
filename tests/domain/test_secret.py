"""What is not handed on: secrets in text, in plain data and in the words of a command line."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from flagcore.domain.launch import Exit, failure
from flagcore.domain.secrets import (
    is_secret,
    redact_arguments,
    redact_data,
    redact_text,
    secrets_in_arguments,
    secrets_in_data,
)
from tests.tasks import task

HIDDEN = "s3cr3tv4lu3"


SECRET_NAMES = (
    *("HF_TOKEN", "hf_token", "HUGGING_FACE_HUB_TOKEN", "--hf-token", "token", "OPENAI_API_KEY", "--api-key", "apiKey"),
    *("apikey", "AWS_SECRET_ACCESS_KEY", "password", "db.password", "PGPASSWORD", "client_secret", "MY_SECRET"),
    *("ADMIN_KEY", "GATEWAY_API_KEYS", "private_key", "ssl.private-key", "Authorization", "DB_PASSWD", "--wandb-key"),
    *("DB_PW", "DB_PASS", "smtp_pass", "PAT", "GITHUB_PAT", "pgPwd", "creds", "s3-key", "SLACK_WEBHOOK_URL"),
    *("MODELARTS_SK", "--ak", "SSHPASS", "auth", "HF_TOKEN_2", "API_KEY_PROD", "TENCENTCLOUD_SECRET_ID", "Cookie"),
    *("SECRET_KEY_BASE", "Pwd"),
)
OTHER_NAMES = (
    *("max_num_batched_tokens", "output_tokens", "bos_token", "eos-token", "time_per_token", "next_token", "PATH"),
    *("forward_pass", "FORWARD_PASS", "pass", "PASS", "pat", "OLDPWD", "sort_key", "base_url", "per_pass"),
    *("public_key", "GPG_KEY", "key_value", "SECRET_NAME", "PASSWORD_FILE", "secretKeyRef", "task", "mask", "SAS"),
    *("num_key_value_heads", "key", "keys", "PWD", "kv_cache_type", "tokenizer", "secretary", "monkey", "api", ""),
)


@pytest.mark.parametrize("name", SECRET_NAMES + OTHER_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name) == (name in SECRET_NAMES)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"export HF_TOKEN={HIDDEN}", "export HF_TOKEN=(left out)"),
        (f"  password: {HIDDEN} with spaces", "  password: (left out)"),
        (f"Namespace(api_key='{HIDDEN}', port=80)", "Namespace(api_key='(left out)', port=80)"),
        (f"args: {{'api_key': ['{HIDDEN}']}}", None),
        (f'{{"host": "a", "api_key": "{HIDDEN}", "port": 80}}', '{"host": "a", "api_key": "(left out)", "port": 80}'),
        (f"vllm serve x --api-key {HIDDEN} --port 80", "vllm serve x --api-key (left out) --port 80"),
        (f"vllm serve x --api-key={HIDDEN} --port 80", "vllm serve x --api-key=(left out) --port 80"),
        (f"['vllm', '--api-key', '{HIDDEN}', '--port', '80']", "['vllm', '--api-key', '(left out)', '--port', '80']"),
        (f"postgres://me:{HIDDEN}@db:5432/x", "postgres://me:(left out)@db:5432/x"),
        (f"Authorization: Bearer {HIDDEN}", "Authorization: (left out)"),
        (f"curl -H 'Authorization: Bearer {HIDDEN}' http://x", "curl -H 'Authorization: (left out)' http://x"),
        (f"x: {{Authorization: Basic {HIDDEN}, port: 1}}", "x: {Authorization: (left out), port: 1}"),
        (f"password: {HIDDEN} hf_abcdefghijABCDEFGHIJ12", "password: (left out)"),
        (f"https://{HIDDEN}{HIDDEN}@example.com/x.git", "https://(left out)@example.com/x.git"),
        (f"GET /x?a=1&X-Amz-Signature={HIDDEN}&b=2", "GET /x?a=1&X-Amz-Signature=(left out)&b=2"),
        (f"-----BEGIN RSA PRIVATE KEY-----\n{HIDDEN}\n-----END", "(left out)-----END"),
        (f"sent 'bearer {HIDDEN}'", "sent 'bearer (left out)'"),
        (f"postgres://h/x?user=u&password={HIDDEN}&b=2", "postgres://h/x?user=u&password=(left out)&b=2"),
        (f"mysql://root:p@{HIDDEN}@h/x", "mysql://root:(left out)@h/x"),
        (f'{{\\"api_key\\": \\"{HIDDEN}\\"}}', '{\\"api_key\\": \\"(left out)\\"}'),
        (f"os.environ['HF_TOKEN'] = b'{HIDDEN}'", "os.environ['HF_TOKEN'] = b'(left out)'"),
        (f'--headers \'{{"X-Api-Key": "{HIDDEN}"}}\' --x', '--headers \'{"X-Api-Key": "(left out)"}\' --x'),
        (f"api_keys:\n  - {HIDDEN}\nport: 1", "api_keys:\n  - (left out)\nport: 1"),
        (f"curl -u me:{HIDDEN} http://x", "curl -u me:(left out) http://x"),
        (f"machine h login me password {HIDDEN}", "machine h login me password (left out)"),
        (
            f"https://open.feishu.cn/open-apis/bot/v2/hook/{HIDDEN}",
            "https://open.feishu.cn/open-apis/bot/v2/hook/(left out)",
        ),
        (f"truncated: {{'password': '{HIDDEN}", "truncated: {'password': '(left out)"),
        ("Basic settings, a bearer instrument", "Basic settings, a bearer instrument"),
        ("/models/sk-llama-3-8b-instruct-awq", "/models/sk-llama-3-8b-instruct-awq"),
        ("secret:\n  name: hf\n", "secret:\n  name: hf\n"),
        (': "${HF_TOKEN:?set it}"; x --token $HF_TOKEN', ': "${HF_TOKEN:?set it}"; x --token $HF_TOKEN'),
        ("pulled with hf_abcdefghijABCDEFGHIJ12", "pulled with (left out)"),
        ("max_tokens=512, eos_token='</s>'", "max_tokens=512, eos_token='</s>'"),
        ("print_info: BOS token = 1 '<s>'", "print_info: BOS token = 1 '<s>'"),
        ("api_key=None, token: null", "api_key=None, token: null"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("--api-key --port 80", "--api-key --port 80"),
    ],
)
def test_secrets_in_text(text: str, shown: str | None) -> None:
    found = redact_text(text)
    assert HIDDEN not in found
    assert shown in (None, found)
    assert redact_text(found) == found


@pytest.mark.parametrize(
    "token",
    [
        *(
            "github_pat_11ABCDEFG0abcdefghijkl",
            "glpat-abcdefghijklmnop",
            "sk-ant-api03-abcdefghijklmnop",
            "gsk_" + 20 * "a",
        ),
        *("rpa_" + 40 * "A", "tgp_v1_" + 43 * "a", "dapi" + 32 * "a", "dop_v1_" + 64 * "b"),
        *("AKIAABCDEFGHIJKLMNOP", "LTAI5tabcdefghijkl", "AIza" + 35 * "b", "xoxb-1234567890-abc", "nvapi-" + 24 * "c"),
        *(
            "npm_" + 36 * "d",
            "pypi-" + 40 * "e",
            "dckr_pat_" + 24 * "f",
            "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl",
        ),
    ],
)
def test_tokens_of_known_formats_are_secrets_by_any_name(token: str) -> None:
    assert redact_text(f"read {token}\n") == "read (left out)\n"
    assert is_secret("SOME_VALUE", f"--x={token}")
    assert secrets_in_data({"SOME_VALUE": token}) == (token,)


@pytest.mark.parametrize("piece", ["\n", "password: ", "a\n", "-eyJ", "x = \n", "api_key=[", '"', "k='\\", "export "])
def test_long_texts_take_no_long_time(piece: str) -> None:
    text = piece * (1 << 17)  # with a time that grows with the square of the length, this exceeds the test's time limit
    assert isinstance(redact_text(f"token {text}"), str)


def test_a_known_secret_is_redacted_everywhere() -> None:
    known = secrets_in_data({"HF_TOKEN": HIDDEN, "PATH": "/usr/bin", "API_KEY": "x"})
    assert known == (HIDDEN,)
    assert redact_text(f"loading with <{HIDDEN}>", known) == "loading with <(left out)>"


@pytest.mark.parametrize("secret", ["s'p\"q\\r$ t/u", "one пароль", "first line\nlast line\n", " padded "])
def test_a_known_secret_is_redacted_however_it_is_written(secret: str) -> None:
    forms = (secret, repr(secret), repr([f'"{secret}']), json.dumps(secret), json.dumps(secret, ensure_ascii=False))
    shown = (*forms, shlex.quote(secret), quote(secret, safe=""), quote_plus(secret), *secret.split("\n"))
    for text in map(str.strip, shown):
        found = redact_text(f"<{text}>", [secret])
        assert not {*re.findall(r"\w+", text)} & {*re.findall(r"\w+", found.replace("(left out)", ""))} - {"n"}


def test_plain_data_round_trips() -> None:
    data: dict[str, Any] = {
        "envs": {"HF_TOKEN": HIDDEN, "A": "1"},
        "argv": ["serve", "--api-key", HIDDEN, "--tp", "2"],
        "storage": f"mysql://u:{HIDDEN}@h/d",
        "n": 3,
        "max_tokens": 5,
        "none": None,
        "points": [{"token": None}],
    }
    shown = redact_data(data)
    assert HIDDEN not in str(shown)
    assert shown["argv"] == ["serve", "--api-key", "(left out)", "--tp", "2"]
    assert {key: shown[key] for key in ("n", "max_tokens", "none", "points")} == {
        key: data[key] for key in ("n", "max_tokens", "none", "points")
    }
    assert set(secrets_in_data(data)) == {HIDDEN}


def test_secrets_of_a_command_line() -> None:
    words = ["p", "--token", HIDDEN, f"--wandb-api-key={HIDDEN}2", "-n", "-1", f"API_KEY={HIDDEN}", "http://a:bcdefg@h"]
    assert secrets_in_arguments(words) == [HIDDEN, HIDDEN + "2", "bcdefg"]
    assert HIDDEN not in " ".join(redact_arguments(words))
    assert secrets_in_arguments(["--max-tokens", "5", "--token", "--other"]) == []
    assert secrets_in_arguments(["--api-key", "one", "two", "--port", "80", "x"]) == ["one", "two"]


def test_the_reason_of_a_failure_has_no_secret_of_the_spec(tmp_path: Path) -> None:
    train = replace(task().spec.train, command=("train", "--api-key", HIDDEN))
    spec = replace(task().spec, envs={"MY_PASSWORD": "hunter-two"}, work=train)
    assert {HIDDEN, "hunter-two"} <= set(spec.secrets)
    (tmp_path / "stdout.log").write_text(f"cannot log in with hunter-two and {HIDDEN}\n")
    _state, reason = failure(Exit(code=1, ended_by=None, duration_s=1.0), str(tmp_path), (), spec.secrets)
    assert "cannot log in with (left out) and (left out)" in reason
