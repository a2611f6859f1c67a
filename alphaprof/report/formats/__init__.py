"""A report in every format: its first screen, its text, its page and its figures."""
