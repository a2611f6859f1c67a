"""The seam between profiling and analysis: what a run directory holds, and how it is written and read."""
