"""The server process: its loop, sessions and handlers, and the catalog of stored chunks."""
