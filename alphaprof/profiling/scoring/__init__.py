"""One teacher-forced pass: statistics of both distributions at every position, by one definition and its two fast back
ends.

`statistics.py` is the definition; `cpu_loops.py` and `gpu_kernels.py` compute the same columns. Not here: sums over
documents (`totals`).
"""
