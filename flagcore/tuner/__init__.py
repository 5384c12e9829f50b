"""The search for the fastest configuration. `loop.tune` reads top-down:

1. `problem` builds the candidates of a spec. `stages.complete` fills in what the spec leaves open, with the hardware
   that `stages.discover` finds. `stages.build` enumerates the legal candidates, `stages.predict` predicts them, and
   `stages.prune` drops those that cannot win.
2. `feasibility` answers from predictions alone: whether a candidate fits, why times are unknown, and a dry run.
3. `loop` repeats: `stages.rank` asks one of `strategies` for the next candidate, `planner` plans its trial,
   `trial_runner` runs it, and `planner` stores it, learns from it (`stages.learn`), and prunes others.
4. `trial_runner` waits for `devices`, `stages.launch` starts the trial, and `stages.measure` watches it.
   `shorten` makes it smaller. A `probe` runs single ranks instead.

What a search may use has one module each: `budget` (trials, time, the limits of each trial), `parallel` (groups
of devices, hosts). `search_state` says what trials have shown: noise, ties, and what runs again. `learning`
corrects predictions by measurements. `store` keeps the trials of a run, `calibration` what later runs use.
"""
