"""Arrays in, numbers out: estimates with intervals, paired differences, gates, formulas.

Nothing here knows the log, a model or a report. `compiled.py` compiles loops.
"""
