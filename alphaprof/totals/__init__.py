"""From the position log to sums per document: every round of every length, counted once, and pooled by domain, draft and
rule.

Not here: time (`costs`) and intervals (`stats`).
"""
