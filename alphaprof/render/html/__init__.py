"""An answer as one self-contained HTML file without scripts: page.py fills page.html.j2, figures.py draws figures.

Nothing in the page comes from anywhere else.
"""
