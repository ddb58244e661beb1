"""Checkpoints of running generations: taken every so many tokens, written while others decode, gone on from after a kill."""
