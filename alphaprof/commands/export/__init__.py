"""`alphaprof export`: a run's acceptance as engines and simulators read it. A new export is a function in `formats.py`.

Not here: reading what engines measured (`importing`).
"""
