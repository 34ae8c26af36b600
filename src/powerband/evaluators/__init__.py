"""Metrics and graders of answers. They send no requests: the stage `evaluate` queries the engines."""
