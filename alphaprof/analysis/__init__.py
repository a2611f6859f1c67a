"""Right of the log: statistics on columns. Nothing here imports torch."""
