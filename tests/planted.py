"""Secrets that tests plant in inputs, and where others can read them."""

import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

MARK = "Xq7Z"
"""Part of each planted secret."""


def secret(number: int) -> str:
    """Return a secret that only its name denotes."""
    return f"{MARK}{number:02}pVt9Lm3kW2cRb8"


VARIABLES = {  # names denote these, also within longer names
    **{
        name: secret(number)
        for number, name in enumerate(
            (
                *("MY_PASSWORD", "WANDB_API_KEY", "AWS_SESSION_TOKEN", "MLFLOW_TRACKING_PASSWORD", "DB_PW", "HF_TOKEN_2"),
                *("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "MODELARTS_SK", "FEISHU_WEBHOOK", "REDISCLI_AUTH", "COOKIE"),
                *("AZURE_STORAGE_CONNECTION_STRING", "NGC_CLI_API_KEY"),
            )
        )
    },
    "PAT": f"ghp_{secret(20)}x",  # values denote these
    "UPSTREAM": f"mysql://me:{secret(21)}@db/x",
    "CACHE": f"redis://:{secret(22)}@cache:6379/0",
    "HEADERS": f"Authorization: Bearer {secret(23)}",
    "OPTIONS": f"--port 80 --admin-api-key {secret(24)}",
    "CONFIG": f'{{"client": {{"apiKey": "{secret(25)}"}}}}',
    "DOWNLOAD": f"https://store/x?sv=1&sig={secret(26)}&user_token={secret(27)}",
    "HOOK": f"https://open.feishu.cn/open-apis/bot/v2/hook/{secret(28)}",
}
WORDS = (
    *("--wandb-key", secret(40)),
    f"--registry-password={secret(41)}",
    *("-H", f"X-Api-Key: {secret(42)}"),
    *("-u", f"me:{secret(43)}"),
    *("--config", f'{{"access_key_secret": "{secret(44)}", "n": 1}}'),
    *("--data", f"s3://AKIAABCDEFGHIJKLMNOP:{secret(45)}@bucket/x"),
    *("--env", f"HF_TOKEN={secret(47)}"),
    f"+logger.api_key={secret(48)}",
    *("--headers", f'{{"Authorization": "Basic {secret(49)}"}}'),
)
"""The words of a command."""
SHELL = {"OPENAI_API_KEY": secret(60), "TENCENTCLOUD_SECRET_KEY": secret(61), "GIT_REMOTE": f"https://{secret(62)}@h/x.git"}
"""Variables of the shell that starts flagcore."""


def exposed_files(folder: Path, others: int = 0o077) -> Iterator[Path]:
    """Yield the files below a folder that other users can read, and those with a bit of `others`."""
    for each in folder.iterdir():
        mode = stat.S_IMODE(each.lstat().st_mode)
        if mode & others and each.is_dir() and not each.is_symlink():
            yield from exposed_files(each, others)
        elif mode & others and each.is_file():
            yield each


def leaks(text: str, context: int = 40) -> Sequence[str]:
    """Return the text around each planted secret in a text."""
    parts = text.split(MARK)
    return [f"{before[-context:]}{MARK}{after[:context]}" for before, after in zip(parts, parts[1:], strict=False)]


def leaking_files(folder: Path, inputs: Collection[str] = ()) -> dict[str, Sequence[str]]:
    """Return the files below a folder, except `inputs`, that expose planted secrets, with the text around these."""
    files = {str(each.relative_to(folder)): each for each in exposed_files(folder)}
    found = {name: leaks(each.read_bytes().decode(errors="replace")) for name, each in files.items()}
    return {name: each for name, each in found.items() if each and name not in inputs}
