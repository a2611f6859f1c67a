"""The command line (typer): options are parsed, the library is called, the answer is shown, errors become exit codes.

`app.py` lists the commands. Not here: what a command computes (`commands`). Heavy imports stay inside the commands.
"""
