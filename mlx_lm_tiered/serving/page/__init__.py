"""The status page at ``/tiered``: what the tiers hold and do, for people."""
