"""`alphaprof trees`: what static draft trees would give on the text that a run measured, by exact replay of ranks.

`build.py` reads the user's trees, chooses and replays, `answer.py` is the result.
There is no verdict: verification of trees is not timed. Not here: the mathematics of trees (`theory`).
"""
