"""The parts of a report that answer a question of their own: one file a section, from the log or the totals to values.

Not here: tables and figures (`render`).
"""
