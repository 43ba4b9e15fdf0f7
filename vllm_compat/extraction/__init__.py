"""Extraction and its proof: a tiny model, an independent reference, the comparison and the demo.

Nothing is imported here: torch, transformers and the consumer are loaded by the functions that need them, so
that `vllm-compat plan` stays fast on a machine that has them and works on one that has not.
"""
