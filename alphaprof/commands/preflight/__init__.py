"""`alphaprof profile --dry-run`: models, data and numerics looked at before a run, as findings with remedies.

Models run in `measure.py`, `memory.py` and `trial.py`; the others read what these found. Not here: the run (`profiling`).
"""
