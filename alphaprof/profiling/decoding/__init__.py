"""Real speculative decoding at batch 1, with KV caches, rules and drafters: what `validate` measures.

Not here: the prediction that it is compared with (`totals`, `costs`).
"""
