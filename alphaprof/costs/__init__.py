"""What rounds cost: step times from this machine, an engine's table or a roofline, and the speedup that follows from
them.

Not here: how steps are timed (`profiling.timing`).
"""
