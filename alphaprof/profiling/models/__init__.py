"""Target, drafts and tokenizers: found, checked, loaded, and what a model computes from hidden states to a distribution.

A new kind of draft is a file here with what `draft.Draft` asks, and a class in `config/options.py`, listed in DRAFTS.
Not here: which texts they run on (`texts`).
"""
