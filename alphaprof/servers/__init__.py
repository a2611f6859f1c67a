"""Servers that others run: what they counted, as metrics pages and files hold it, for `diagnose` and `import`.

`files.py` recognizes a file, and adds up what its lines count; `pages.py` reads metrics pages, and what both say;
`client.py` asks a server.
"""
