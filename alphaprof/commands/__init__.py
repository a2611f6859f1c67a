"""One module or package a command: what it collects, the value that it answers with, and its texts.

A value is an `Answer` (`render/answer.py`). Not here: options (`cli`) and the report itself (`report`). torch is imported in
`dry_run.py`, `doctor.py` and `validate/measure.py` alone.
"""
