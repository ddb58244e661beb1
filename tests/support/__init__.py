"""What several tests need: servers, models."""
