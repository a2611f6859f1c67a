"""The parts of scripts/gpu_check.py, and what they share. A part is a function in a file of this folder, named in PARTS."""
