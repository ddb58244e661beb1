"""The shared tier: an object store behind the SSD tier, in which machines find what others have computed."""
