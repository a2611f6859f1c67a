"""Left of the log: models and texts in, the position log out. The only package, beside the measuring files of
commands, with torch.

Not here: statistics over documents. Each folder may import those before it: `models` load, `texts` to measure on, `scoring`,
`heads`, `timing`, `run` (the whole), `decoding` for real, `training`.
"""
