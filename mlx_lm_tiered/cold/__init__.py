"""The SSD tier: file format, store, spill queue."""
