"""Real processes, real signals: kill and stop everything at every step, and prove that no byte was wrong."""
