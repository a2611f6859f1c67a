"""Real speculative decoding at batch 1, with KV caches, rules and drafters: what `validate` and `rollout` measure.

Not here: the prediction that it is compared with (`totals`, `costs`).
"""
