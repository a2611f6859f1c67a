"""`alphaprof validate`: real speculative decoding beside what the run predicts, with the error of the prediction.

Decoding runs in `measure.py`; nothing else here imports torch.
"""
