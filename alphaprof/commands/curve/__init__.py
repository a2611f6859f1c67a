"""`alphaprof curve`: what heads of several sizes reach on test texts, and what more data would bring.

`collect.py` reads the heads, `build.py` counts rounds and speedups, `outlook.py` forecasts, `answer.py` is the result and
`figure.py` its figure. Not here: training (`train`).
"""
