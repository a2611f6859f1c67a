"""The `Report` value of a run: estimates, speedups, verdicts and warnings, built from totals and step times.

Nothing here prints (`render`). A section of its own is a file in `sections`.
"""
