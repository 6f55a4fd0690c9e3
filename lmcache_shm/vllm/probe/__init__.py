"""What a model's KV cache groups would be, found through vLLM's own configuration, without an engine or weights."""
