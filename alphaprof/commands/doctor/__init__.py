"""`alphaprof doctor`: what alphaprof finds on this machine, as text for a bug report.

Facts and text (build.py), and speeds, which need torch (measure.py). Nothing of a run or a profile.
"""
