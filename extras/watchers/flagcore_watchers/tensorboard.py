"""Writes trials as TensorBoard event files with their hyperparameters, in the folder `tensorboard` of the run."""

from pathlib import Path

from flagcore.domain.trial import TRIAL_FINISHED, RunEvent
from flagcore_watchers import about, metrics, params

try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import summary_v2 as hparams
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise ImportError("run `pip install 'flagcore[tensorboard]'`") from error


def on_event(event: RunEvent) -> None:
    """Write a file for each trial that ends."""
    trial = event.trial
    if event.kind != TRIAL_FINISHED or trial is None:
        return
    folder = Path(event.folder) / "tensorboard" / f"trial-{trial['number']}"
    writer = EventFileWriter(str(folder))
    texts = about(trial)
    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics(trial).items()]
    name = f"{event.run} trial {trial['number']}"
    for summary in (hparams.hparams_pb({**params(trial), **texts}, trial_id=name), Summary(value=values)):
        writer.add_event(Event(wall_time=event.time, step=trial["number"], summary=summary))
    writer.close()
