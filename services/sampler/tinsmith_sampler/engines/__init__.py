"""Engines as the sampler sees them: their protocol, what drives one, and Tinsmith's own.

vLLM is in `vllm`. Where weights come from is known above, in `weights`.
"""
