"""`alphaprof import`: what vLLM and SGLang logged for each request as a run, or prompts and answers, for prompt lookup.

Not here: what a report says of an imported run (`report`).
"""
