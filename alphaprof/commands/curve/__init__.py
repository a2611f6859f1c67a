"""`alphaprof curve`: what heads of several sizes reach on test texts, and what more data would bring.

`collect.py` reads heads and holds them against each other, `measure.py` tests those that have no record, `build.py` counts
rounds and speedups, `outlook.py` forecasts, `answer.py` is the result, `page.py` its figure. Not here: training (`train`).
"""
