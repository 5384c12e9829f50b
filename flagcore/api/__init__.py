"""The Python API, on which the CLI is built. It connects plugins, engine, launcher, strategy, store and loop.

A name is imported from its module on first use, because most commands need few modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flagcore.api.explaining.reports import compare, explain, explain_candidate, explain_like
    from flagcore.api.inputs import LoadedSpec, changed_spec, with_settings
    from flagcore.api.managing.calibration import calibrate, calibrations, summary
    from flagcore.api.managing.host_report import check_hosts
    from flagcore.api.managing.inspection import chip_table, devices, doctor, plugin_table, public_model_table
    from flagcore.api.managing.report import REPORT, list_runs, report, show_run
    from flagcore.api.managing.specs import (
        ImportedTrials,
        check_imported,
        defaults_of,
        import_history,
        new_spec,
        read_command,
        read_tree,
        spec_of_model,
    )
    from flagcore.api.planning.estimate import estimate
    from flagcore.api.planning.jobs import AT_ONCE, estimate_jobs
    from flagcore.api.planning.probe import Probed, probe
    from flagcore.api.runs import Run, load_run
    from flagcore.api.tuning.export import Outcome
    from flagcore.api.tuning.run_best import run_best
    from flagcore.api.tuning.targets import Exported, export, export_targets, manifest
    from flagcore.api.tuning.tune import tune
    from flagcore.report.candidate_report import CandidateReport, Comparison
    from flagcore.report.estimate import Estimate
    from flagcore.report.explanation import Explanation

NAMES = {
    "api.explaining.reports": "compare explain explain_candidate explain_like",
    "api.inputs": "LoadedSpec changed_spec with_settings",
    "api.managing.calibration": "calibrate calibrations summary",
    "api.managing.host_report": "check_hosts",
    "api.managing.inspection": "chip_table devices doctor plugin_table public_model_table",
    "api.managing.report": "REPORT list_runs report show_run",
    "api.managing.specs": "ImportedTrials check_imported defaults_of import_history new_spec read_command read_tree "
    "spec_of_model",
    "api.planning.estimate": "estimate",
    "api.planning.jobs": "AT_ONCE estimate_jobs",
    "api.planning.probe": "Probed probe",
    "api.runs": "Run load_run",
    "api.tuning.export": "Outcome",
    "api.tuning.run_best": "run_best",
    "api.tuning.targets": "Exported export export_targets manifest",
    "api.tuning.tune": "tune",
    "report.candidate_report": "CandidateReport Comparison",
    "report.estimate": "Estimate",
    "report.explanation": "Explanation",
}
"""The names of this package by module."""


def __getattr__(name: str) -> Any:
    for module, names in NAMES.items():
        if name in names.split():
            return getattr(import_module(f"flagcore.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
