"""The profile file: every option declared once, read from YAML with its overrides, and refused with a hint where it is
wrong.

Not here: options of single commands (`cli`). This is the only package that imports pydantic and yaml.
"""
