"""Predictions of candidates with the memory of each model component."""

from dataclasses import replace

from flagcore.contracts import Platform
from flagcore.domain.prediction import Prediction, components_of_row
from flagcore.domain.space import Columns
from flagcore.tuner.feasibility import no_time
from flagcore.tuner.stages.predict import predict_columns, predict_components, predict_stage_layers, with_figures


def detailed_predictions(platform: Platform, columns: Columns, *, details: bool = True) -> list[Prediction]:
    """Return the prediction of each row, with `details` with the layers of each stage, and with the memory of the model
    components on the stage that needs the most, which take as long again.

    If a row has no predicted time, its prediction contains the reason.
    """
    predictions = predict_columns(platform, columns)
    components = predict_components(platform, columns, predictions.worst_stage) if details else {}
    layers = predict_stage_layers(platform, columns) if details else {}
    found = []
    for row in range(len(predictions.step_time_s)):
        figures = replace(predictions.row(row), components=components_of_row(components, row))
        if figures.step_time_s is None:
            figures = replace(figures, reason=f"no time: {no_time(platform.task, platform.costs)}")
        found.append(with_figures(platform.task, figures, layers.get(row, ())))
    return found
