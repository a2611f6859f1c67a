"""The command line (typer): options are parsed here, the library is called, answers are printed, errors become exit
codes.

Not here: what a command computes (`commands`), and the profile file (`config`). Heavy imports stay inside the commands.
"""
