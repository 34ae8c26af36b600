"""Runs in the picker process, which Envoy calls once per request: admission, queueing and routing."""
