"""What runs inside vLLM's worker processes. Nothing here imports the consumer."""
