"""alphaprof: will speculative decoding pay, for which traffic and draft, and how sure is that?"""

__version__ = "0.1.0"
