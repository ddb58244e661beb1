"""The main job in one command: a long chat that survives a restart of the server."""
