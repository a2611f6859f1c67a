"""Target, drafts and tokenizers: found, checked, loaded, and what a model computes from hidden states to a distribution.

A new kind of draft is added here (`drafts.py`) and in `config/options.py`. Not here: which texts they run on (`texts`).
"""
