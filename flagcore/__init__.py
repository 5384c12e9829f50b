"""flagcore finds the fastest way to train or serve a large language model on any AI chip.

The names of the Python interface (docs/python.md) are imported from `flagcore.api` on first use, so that importing this
package is fast. `flagcore.errors` has the other exceptions.
"""

__version__ = "0.1.0"

SDK = (
    *("contracts", "domain", "errors", "hooks", "i18n", "launchers", "loading", "physics", "plugins", "report"),
    *("spec.clusters", "spec.jobs", "spec.knobs", "spec.models", "spec.plain_data", "spec.schema", "spec.shapes"),
    *("spec.validate", "api.commands.doctor", "api.commands.export", "api.commands.importing"),
    *("api.inputs", "api.jobs", "api.notes", "api.runs"),
    *("cli.main", "cli.options", "tuner.devices", "tuner.feasibility", "tuner.problem", "tuner.stages.predict"),
)
"""The modules and packages that other distributions may import. Every distribution declares its own."""

__all__ = [
    *("CandidateReport", "Comparison", "Estimate", "Explanation", "FlagError", "Outcome", "Run", "__version__"),
    *("compare", "estimate", "explain", "explain_candidate", "load_run", "tune"),
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'flagcore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("flagcore.errors" if name == "FlagError" else "flagcore.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
