"""The JSON flags of vLLM whose keys and values `keys.yaml` describes: what vLLM rejects when it starts."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

from flagcore_serving.job import EngineArg

from flagcore.errors import SpecError
from flagcore.spec.plain_data import package_yaml

KEYS = package_yaml(__package__, "keys.yaml")
NUMBERS = re.compile(r"\d+|\[(\d+(, *\d+)*)?\]")


def check(args: Mapping[str, EngineArg]) -> None:
    """Raise SpecError for a misspelt key of a JSON flag, and for a value that vLLM rejects."""
    for name, value in args.items():
        flag, _, key = name.partition(".")
        row, key = KEYS.get(flag.replace("_", "-")), key.partition(".")[0].replace("-", "_")
        if not row or not key or "$" in str(value):
            continue
        known, words = row["keys"].split(), row.get("words", {}).get(key, ["*"])
        close = get_close_matches(key, () if key in known else known, n=1, cutoff=0.8)
        problem, fix = f"is not a key of {flag}", f"did you mean {''.join(close)}?"
        if not close and str(value) not in words:
            close = get_close_matches(str(value), words, n=1) if "*" in words else words
            problem, fix = "is not a value that vLLM accepts", f"use {' or '.join(close)}"
        if key in row.get("numbers", "").split() and not NUMBERS.fullmatch(str(value)):
            close, problem, fix = [key], "must be whole numbers", "write one such as 512, or a list such as [1, 2, 4]"
        if close:
            raise SpecError(key=f"serve.engine_args.{name}", value=value, problem=problem, fix=fix)
