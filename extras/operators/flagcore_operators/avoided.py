"""What vendors' plugins say against implementations of operators: their files `operators.yaml`."""

from collections.abc import Sequence
from dataclasses import dataclass

from flagcore_vendorkit.fields import build, read_file

from flagcore.domain.chip import Source


def avoided(package: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return a vendor's reasons against implementations, by operator, from `operators.yaml` of its plugin's package.

    `names`: the libraries whose entries apply. Raises SpecError if the file is not valid.
    """
    content, found = read_file(package, "operators.yaml") or {}, dict[str, dict[str, str]]()
    for entry in build(tuple[Avoided, ...], content.get("avoid") or [], f"{package}/operators.yaml", "avoid"):
        for operator in entry.operators if entry.name in names else ():
            found.setdefault(operator, {})[entry.implementation] = f"{entry.why} ({entry.source.detail})"
    return found


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """An implementation that a vendor, or users of its chips, found wrong, broken or slow for some operators.

    `name`: that of the library.
    """

    name: str
    implementation: str
    operators: tuple[str, ...]
    why: str
    source: Source
