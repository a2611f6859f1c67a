"""Training an EAGLE-3 head on the texts of a run, on one device; how it does on texts that it has not seen."""
