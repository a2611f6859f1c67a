"""Left of the log: models and texts in, the position log out. The only room, beside the measuring files of commands,
with torch.

Not here: statistics over documents. `models` load, `texts` to measure on, `scoring`, `timing`, `run` (the whole),
`decoding` for real.
"""
