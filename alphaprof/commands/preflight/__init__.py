"""`alphaprof profile --dry-run`: models, data and numerics looked at before a run, as findings with remedies.

Models run in `measure.py`, `inspection.py` and `trial.py`; the others only read what these found.
"""
