"""Attention of a decode step over quantized KV, read in place from the cache's own buffers: one kernel body, in CUDA, in Metal and, for tests, in plain C++."""
