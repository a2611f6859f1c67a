"""The user's own engine, vLLM in an environment of its own or on an address: it writes texts, times steps, and decodes.

The run and validate call it; it imports models, texts and timing. vLLM is imported by `vllm_worker.py` alone, over there.
"""
