"""`alphaprof rollout`: texts decoded by lossy rules, their rounds, and what the target gives up for them.

Decoding runs in `measure.py`; nothing else here imports torch.
"""
