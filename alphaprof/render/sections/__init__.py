"""The sections of a report below its first screen: what each consists of, in tables and lines that every format draws.

`contents.py` lists them; the other files write them.
"""
