"""The catalog: which chunk each slot holds. Only the server uses it."""
