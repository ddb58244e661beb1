"""What a running server offers beside upstream's API: statistics, flush, shutdown."""
