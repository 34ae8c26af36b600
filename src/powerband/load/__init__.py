"""The load generator: arrival times (arrivals), request texts (prompts), HTTP client (wire), run (generator)."""
