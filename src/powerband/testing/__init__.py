"""Shipped for tests of Powerband and of adapters to it: a golden server and contract suites."""
