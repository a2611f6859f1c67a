"""`alphaprof compare`: two drafts on the same prompts, or one draft under two targets.

`comparison.py` pairs documents and takes differences, `target_change.py` says whether a draft survives another target.
"""
