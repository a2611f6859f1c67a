"""`alphaprof validate`: real speculative decoding beside what the run predicts, with the error of the prediction.

`measure.py` decodes (with torch), `build.py` compares that with the prediction, `answer.py` is the result.
"""
