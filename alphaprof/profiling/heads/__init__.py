"""Draft heads: networks on the target's own hidden states, whose proposal depends on how far a round is; their files.

Not here: drafts that are models of their own, and prompt lookup (`models`).
"""
