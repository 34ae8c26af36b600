"""Shared by the end-to-end tests and the proofs."""
