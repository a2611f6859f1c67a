"""`alphaprof check`: a run compared with thresholds, with its own decision, or with an older run, for CI.

`build.py` judges, `answer.py` is the outcome. Not here: gates (`stats`), pairs of documents (`compare`).
"""
