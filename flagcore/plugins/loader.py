"""One plugin, loaded into its own pluggy manager: its errors cannot affect another plugin."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import Distribution
from types import SimpleNamespace

import pluggy
from packaging.version import Version

from flagcore import __version__, hooks
from flagcore.plugins.installed import BadPlugin

HOOK_GROUPS = (hooks.ChipHooks, hooks.CostHooks, hooks.EngineHooks, hooks.TrialHooks)
HOOKS = tuple(name for group in HOOK_GROUPS for name in vars(group) if name.startswith("flagcore_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plugin that loaded. `hooks` are the ones it implements; `manager` has only this plugin.

    `warnings` say what will stop working in a later release.
    """

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]
    manager: pluggy.PluginManager
    warnings: tuple[str, ...] = ()

    def ask(self, hook: str, arguments: Mapping[str, object]) -> object:
        """Call this plugin's implementation of `hook`. Raises its exceptions; None if there is none."""
        caller = getattr(self.manager.hook, hook)
        answer = caller(**arguments)
        if caller.spec.opts["firstresult"]:
            return answer
        return answer[0] if answer else None


def make_plugin(name: str, module: object, distribution: Distribution | None = None) -> Plugin:
    """Check that `module` (or object) implements the hooks. Raises BadPlugin with the reason."""
    if isinstance(module, type):
        raise BadPlugin(f"names the class {module.__name__}; name a module, or an object")
    for member in dir(module):
        value = getattr(module, member) if member.startswith("flagcore_") else None
        if inspect.isroutine(value) and not hasattr(value, "flagcore_impl"):
            raise BadPlugin(f"{member} lacks @hookimpl, so it would never be asked; add the decorator")
    _written_for(module)
    module, warnings = _with_new_names(module)
    manager = pluggy.PluginManager("flagcore")
    for group in HOOK_GROUPS:
        manager.add_hookspecs(group)
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        raise BadPlugin(str(error)) from error
    callers = manager.get_hookcallers(module) or []
    for caller in callers:
        if not caller.has_spec():  # what manager.check_pending() refuses, with a suggestion
            bare = [hook.removeprefix("flagcore_") for hook in HOOKS]
            near = get_close_matches(caller.name.removeprefix("flagcore_"), bare, n=1)
            hint = f"did you mean flagcore_{near[0]}?" if near else f"the hooks are {', '.join(HOOKS)}"
            raise BadPlugin(f"{caller.name} is not a hook; {hint}")
    if not callers:
        raise BadPlugin("implements no hooks; mark its functions with @hookimpl")
    return Plugin(
        name=name,
        distribution=distribution.metadata["Name"] if distribution else "",
        version=distribution.version if distribution else "",
        hooks=tuple(sorted(caller.name for caller in callers)),
        manager=manager,
        warnings=warnings,
    )


def _written_for(module: object) -> None:
    """Raise BadPlugin for a plugin that was written for hooks that this flagcore does not have."""
    api = getattr(module, "HOOKS_API", hooks.HOOKS_API)
    if isinstance(api, bool) or not isinstance(api, int) or api < 1:
        raise BadPlugin(
            f"has HOOKS_API = {api!r}, which is not a version of the hooks; write HOOKS_API = {hooks.HOOKS_API}"
        )
    if api > hooks.HOOKS_API:
        fix = "install a newer flagcore, or an older version of the plugin"
        raise BadPlugin(f"was written for hooks {api}, but this flagcore has hooks {hooks.HOOKS_API}; {fix}")


def _with_new_names(module: object) -> tuple[object, tuple[str, ...]]:
    """Return a plugin with renamed hooks under their new names, and a warning for each old name.

    Raises BadPlugin for a name that was removed, and for a hook that has both names.
    """
    old_names = [name for name in hooks.RENAMED_HOOKS if hasattr(module, name)]
    if not old_names:
        return module, ()
    members = {name: getattr(module, name) for name in dir(module) if name.startswith("flagcore_")}
    warnings = []
    for name in old_names:
        new, removed_in = hooks.RENAMED_HOOKS[name].new_name, hooks.RENAMED_HOOKS[name].removed_in
        if Version(__version__) >= Version(removed_in):
            raise BadPlugin(f"{name} was removed in flagcore {removed_in}; use {new}")
        if new in members:
            raise BadPlugin(f"has both {name} and {new}; {name} is the old name of the same hook, remove it")
        members[new] = members.pop(name)
        warnings.append(f"{name} is deprecated; use {new}, the old name will be removed in flagcore {removed_in}")
    return SimpleNamespace(**members), tuple(warnings)
