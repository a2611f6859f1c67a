"""Answers as text: `answer.py` is what every command answers with, `json.py` its JSON; the others draw a report.

Renderers compute nothing; they share names, sentences and tables. Not here: texts of other commands (`commands`).
"""
