"""Moving bytes between KV cache blocks and the arena."""
