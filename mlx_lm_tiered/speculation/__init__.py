"""Speculative decoding: draft tokens cheaply, verify them in one forward of the model, keep what it would have said itself."""
