"""Legality rules whose knobs and messages are rows of a table."""

from collections.abc import Callable, Mapping

from flagcore.domain.space import BoolArray, Columns, Rule
from flagcore.i18n import Message
from flagcore.spec.plain_data import package_yaml


class RuleTable:
    """The rules in the file `rules.yaml` of a package: `knobs`, and the `message` with fields for their names.

    `names`: the names of knobs by their fields, such as `TP`.
    """

    def __init__(self, package: str, names: Mapping[str, str]) -> None:
        self.rows: Mapping[str, Mapping[str, str]] = package_yaml(package, "rules.yaml")
        self.names = names

    def __call__(
        self, name: str, broken: Callable[[Columns], BoolArray], /, message: str = "", **values: object
    ) -> Rule:
        """Return the rule of a row.

        `broken`: as in Rule. `message`: replaces that of the row. `values`: those of the other fields of the message.
        """
        row = self.rows[name]
        knobs = tuple(self.names[field] for field in row["knobs"].split())
        text = Message(message or row["message"], **self.names, **values)
        return Rule(name=name, knobs=knobs, message=text, broken=broken)
