"""Keeping: documents on disk, and a directory for every run."""
