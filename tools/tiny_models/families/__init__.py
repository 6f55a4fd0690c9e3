"""One module per tiny model: CONFIG, and where needed ENGINE, HOOKS, STUBS, ENV."""
