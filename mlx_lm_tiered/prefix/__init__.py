"""Reusable prefixes: the index over tokens, the RAM tier, and take and put over both tiers."""
