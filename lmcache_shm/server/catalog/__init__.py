"""MEANING: which slot holds what. Used by the server; keys and hits also by the engine side."""
