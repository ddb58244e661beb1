"""Measurements against real server processes."""
