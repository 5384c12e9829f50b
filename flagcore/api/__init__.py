"""The Python API, on which the CLI is built. It connects plugins, engine, launcher, strategy, store and loop.

A name is imported from its module on first use, because most commands need few modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flagcore.api.commands.compare import compare
    from flagcore.api.commands.doctor import (
        check_hosts,
        chip_table,
        devices,
        doctor,
        plugin_table,
        require_chip,
        verdict,
    )
    from flagcore.api.commands.estimate import estimate
    from flagcore.api.commands.explain import explain, explain_candidate, explain_like
    from flagcore.api.commands.export import Exported, export, export_targets
    from flagcore.api.commands.importing import check_imported, defaults_of, new_spec, read_tree, spec_of_model
    from flagcore.api.commands.probe import Probed, probe
    from flagcore.api.commands.report import REPORT, list_runs, report, show_run
    from flagcore.api.commands.run import plan_server, run_best
    from flagcore.api.commands.tune import dry_run, tune
    from flagcore.api.inputs import RUNS, LoadedSpec, changed_spec, specs_by_engine, with_limits, with_settings
    from flagcore.api.jobs import AT_ONCE, estimate_jobs
    from flagcore.api.outcome import Outcome
    from flagcore.api.runs import Run, load_run
    from flagcore.report.candidate_report import CandidateReport, Comparison
    from flagcore.report.estimate import Estimate
    from flagcore.report.explanation import Explanation
    from flagcore.spec.models import model_from

NAMES = {
    "api.commands.compare": "compare",
    "api.commands.doctor": "check_hosts chip_table devices doctor plugin_table require_chip verdict",
    "api.commands.estimate": "estimate",
    "api.commands.explain": "explain explain_candidate explain_like",
    "api.commands.export": "Exported export export_targets",
    "api.commands.importing": "check_imported defaults_of new_spec read_tree spec_of_model",
    "api.inputs": "RUNS LoadedSpec changed_spec specs_by_engine with_limits with_settings",
    "api.jobs": "AT_ONCE estimate_jobs",
    "api.outcome": "Outcome",
    "api.commands.probe": "Probed probe",
    "api.commands.report": "REPORT list_runs report show_run",
    "api.commands.run": "plan_server run_best",
    "api.runs": "Run load_run",
    "api.commands.tune": "dry_run tune",
    "report.candidate_report": "CandidateReport Comparison",
    "report.estimate": "Estimate",
    "report.explanation": "Explanation",
    "spec.models": "model_from",
}
"""The names of this package by module."""


def __getattr__(name: str) -> Any:
    for module, names in NAMES.items():
        if name in names.split():
            return getattr(import_module(f"flagcore.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
