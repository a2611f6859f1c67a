"""`alphaprof compare`: two drafts on the same prompts, paired document by document.

`build.py` pairs documents and takes differences, `answer.py` is the result. Not here: the gate against a baseline (`check`).
"""
