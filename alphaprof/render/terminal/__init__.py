"""The report in the terminal (rich).

Not here: tables that commands share with it (`render.tables`).
"""
