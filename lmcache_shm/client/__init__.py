"""An engine's side of the cache, free of vLLM: connection, registration, look-ups, load plans, stores in flight."""
