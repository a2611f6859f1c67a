"""One room a command: what it collects, the value that it builds, and its text. A room is one file until it grows.

torch is imported in `measure.py`, `inspection.py` and `trial.py` alone. Not here: options (`cli`) and the report itself
(`report`).
"""
