"""Training engines for programs that somebody else wrote. They share one description of a program and one physics.

- `program`: the section `train.program` of a spec, and the knobs that it describes
- `meaning`: rules and predictions for knobs with a meaning
- `logs`: step times, losses, memory and values in the log of a run
- `start`: the command and the configuration file of a candidate
- `trainer`: the engine `command`, which connects these parts
"""
