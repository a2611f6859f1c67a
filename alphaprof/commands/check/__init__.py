"""`alphaprof check`: a run compared with thresholds, with its own decision, or with an older run, for CI.

Not here: the statistics of gates (`stats`).
"""
