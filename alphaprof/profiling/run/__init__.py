"""A run from its profile to its directory: `profile.py` reads top to bottom, shards are measured and written, a killed run
resumes.

Not here: what a shard holds (`log`).
"""
