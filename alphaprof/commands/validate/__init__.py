"""`alphaprof validate`: real speculative decoding beside what the run predicts, with the error of the prediction.

`measure.py` decodes (with torch), `validation.py` compares that with the prediction.
"""
