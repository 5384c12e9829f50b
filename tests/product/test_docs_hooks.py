"""The pages about hooks are tested: every hook is there with its arguments, and every snippet works."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from flagcore_testing.examples import FOREIGN_CHIP, task_on

from docs.site.docstrings import HOOKS as SPECS
from flagcore.domain.cluster import NodeGroup
from flagcore.plugins import LoadedPlugins
from flagcore.vendorkit.engines import Quirks

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", SPECS)
def test_every_hook_is_documented_with_its_arguments(name: str) -> None:
    arguments = [argument for argument in inspect.signature(SPECS[name]).parameters if argument != "self"]
    assert f"## {name}({', '.join(arguments)})\n" in (DOCS / "hooks.md").read_text()


def test_no_hook_is_documented_that_does_not_exist() -> None:
    assert re.findall(r"^## (flagcore_\w+)", (DOCS / "hooks.md").read_text(), re.MULTILINE) == list(SPECS)


def test_the_page_of_plugins_lists_every_section_of_the_quirks() -> None:
    page = (DOCS / "plugin-data.md").read_text()
    assert set(re.findall(r"^\| `([a-z]+)` \| .* \| `flagcore_", page, re.MULTILINE)) == set(Quirks.__annotations__)
    assert set(re.findall(r"`(flagcore_[a-z]+_[a-z_]+)`", page)) <= set(SPECS)


def test_the_examples_of_all_hooks_work_as_one_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "hooks.md").read_text(), re.DOTALL)
    exec(compile("\n".join(snippets), "docs/hooks.md", "exec"), vars(module))
    loaded = LoadedPlugins.of({"acme": module})
    (plugin,) = loaded.plugins
    assert set(plugin.hooks) == set(SPECS)
    chip = loaded.find_chip("ACME A1")
    assert chip is not None
    for each in (chip, FOREIGN_CHIP):
        group, task = NodeGroup(chip=each, nodes=1, devices_per_node=8), task_on(each)
        is_own = each is chip
        assert bool(loaded.topology(group)) == is_own
        assert bool(loaded.memory_model(group, "megatron")) == is_own
        assert bool(loaded.kernel_costs(each, "megatron")) == is_own
        assert bool(loaded.collective_costs(group, "megatron")) == is_own
        assert bool(loaded.environment(each, "megatron")) == is_own
        assert bool(loaded.knobs(each, "megatron")) == is_own
        advice = loaded.check_task(task)
        assert [bool(advice.rules), bool(advice.failures)] == [is_own, is_own]
        assert loaded.engine_support(each, "megatron").device_type == ("acme" if is_own else None)
    assert loaded.devices() == ()
    assert loaded.failures == ()
