"""The seam: what a run directory holds, how it is written so that a killed process harms nothing, and how it is read.

Columns are declared in `schema.py`. Not here: models (left of it, `profiling`) and statistics (right of it, `totals`,
`stats`).
"""
