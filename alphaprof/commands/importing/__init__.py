"""`alphaprof import`: what vLLM and SGLang logged for each request as a run, and counters of vLLM as a first look.

Not here: what a report says of an imported run (`report`).
"""
