"""The commands of ``mlx_lm.tiered``, and what they share."""
