"""Which stored token sequence serves the longest prefix of a prompt: keys, sorted."""
