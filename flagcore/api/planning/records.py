"""Predictions as plain data, in the format of job records."""

from dataclasses import replace
from typing import Any

from flagcore.contracts import Platform
from flagcore.domain.prediction import components_of_row
from flagcore.domain.space import Columns
from flagcore.tuner.feasibility import no_time
from flagcore.tuner.stages.predict import predict_columns, predict_components, predict_stage_layers, record


def prediction_records(platform: Platform, columns: Columns, *, details: bool = True) -> list[dict[str, Any]]:
    """Return the prediction of each row, with `details` with the layers of each stage, and with the memory of the model
    components on the stage that needs the most, which take as long again.

    If a row has no predicted time, its record contains the reason.
    """
    predictions = predict_columns(platform, columns)
    components = predict_components(platform, columns, predictions.worst_stage) if details else {}
    layers = predict_stage_layers(platform, columns) if details else {}
    records = []
    for row in range(len(predictions.step_time_s)):
        figures = replace(predictions.row(row), components=components_of_row(components, row))
        prediction_record = record(platform.task, figures, layers.get(row, ()))
        has_time = figures.step_time_s is not None
        records.append(
            prediction_record
            if has_time
            else {"reason": f"no time: {no_time(platform.task, platform.costs)}", **prediction_record}
        )
    return records
