"""A report as text: terminal, HTML page, Markdown, JSON. Renderers compute nothing; they share names, sentences and
tables.

Not here: the text of other commands, which stands with them (`commands`).
"""
