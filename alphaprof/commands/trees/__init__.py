"""`alphaprof trees`: what static draft trees would give on the text that a run measured.

Not here: the mathematics of trees (`theory`).
"""
