"""`alphaprof compare`: two drafts on the same prompts, paired document by document, and whether they may be compared at
all.

Not here: the gate against a baseline, which uses the pairs (`check`).
"""
