"""`alphaprof predict`: the formulas on numbers that a user gives, without a run or a model.

Not here: the formulas themselves (`stats.formulas`).
"""
