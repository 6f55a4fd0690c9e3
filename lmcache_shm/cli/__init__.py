"""PEOPLE: the command line. Commands are imported one by one, when asked for (see app)."""
