"""The memory guard: what a request will need, what the device may hold, and what to do when the two do not agree."""
