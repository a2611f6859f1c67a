"""`alphaprof validate`: real speculative decoding beside what the run predicts, with the error of the prediction.

`measure.py` decodes (with torch), `timings.py` is what a clock says of that, `build.py` compares, `answer.py` is the result.
"""
