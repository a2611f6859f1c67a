"""`alphaprof export`: a run's draft as an engine starts it, its acceptance for simulators, its texts for trainers.

Not here: reading what engines measured (`importing`).
"""
