"""The search for the fastest configuration. `loop.tune` reads top-down:

1. `problem` builds the candidates of a spec. `stages.complete` fills in what the spec leaves open, with the hardware
   that `stages.discover` finds. `stages.build` enumerates the legal candidates, `stages.predict` predicts them, and
   `stages.prune` drops those that cannot win.
2. `feasibility` answers from predictions alone: whether a candidate fits, why times are unknown, and a dry run.
3. `loop` repeats: `stages.rank` asks one of `strategies` for the next candidate, `trial_runner` runs it, and its result
   prunes others. `stages.limit` ends trials and the search.
4. `trial_runner` runs a trial. `stages.shorten` makes it smaller, `devices` waits for its devices,
   `stages.launch` starts it, and `stages.measure` watches it and its devices. A probe runs single ranks instead, with
   `stages.probe`.

`learning` corrects predictions by measurements. `store` keeps the trials of a run, `calibration` what later runs use.
"""
