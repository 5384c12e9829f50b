"""The Python API, on which the CLI is built. It connects plugins, engine, launcher, strategy, store and loop."""

from flagcore.api.explaining.compare import compare
from flagcore.api.explaining.states import explain, explain_candidate
from flagcore.api.inputs import LoadedSpec, changed_spec, with_settings
from flagcore.api.managing.calibration import calibrate, calibrations, forget, summary
from flagcore.api.managing.history import ImportedTrials, import_history
from flagcore.api.managing.hosts import check_hosts
from flagcore.api.managing.inspection import chip_table, devices, doctor, plugin_table, public_model_table
from flagcore.api.managing.new_spec import (
    check_imported,
    defaults_of,
    new_spec,
    read_command,
    read_tree,
    spec_of_model,
)
from flagcore.api.managing.report import REPORT, report
from flagcore.api.managing.run_list import list_runs, show_run
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
