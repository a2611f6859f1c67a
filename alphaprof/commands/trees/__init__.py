"""`alphaprof trees`: what static draft trees would give on the text that a run measured.

`build.py` replays them, `answer.py` is what it finds. Not here: the mathematics of trees (`theory`).
"""
