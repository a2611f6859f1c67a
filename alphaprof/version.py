"""The version of alphaprof: what manifests, reports and `alphaprof --version` say."""

__version__ = "0.1.0"
