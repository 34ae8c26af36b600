"""Sending: when (arrivals), what (prompts), how (the wire), and a schedule driven to its end (generator)."""
