"""Runs in the supervisor process, which starts and restarts Envoy, the picker and the replicas."""
