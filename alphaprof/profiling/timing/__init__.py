"""How long the steps of target and drafts take on this machine, with KV caches, over batch sizes and contexts.

Not here: what times mean for a speedup (`costs`).
"""
