"""What positions are measured on: rows of datasets as documents, and their continuations, generated or given, in
batches.

Not here: probabilities of their tokens (`scoring`). This is the only package that imports datasets.
"""
