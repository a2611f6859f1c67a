"""`alphaprof check`: a run compared with thresholds, with its own decision, or with an older run, for CI.

`build.py` judges, `baseline.py` compares with an older run, `answer.py` is the outcome. Not here: gates (`stats`).
"""
