"""Launchers: start replicas."""
