"""Running: the one place that starts, watches and stops things."""
