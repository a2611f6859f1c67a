"""The report as one self-contained HTML file: page.py fills page.html.j2, figures are plotly's, page.js filters them.

Nothing in the page comes from anywhere else.
"""
