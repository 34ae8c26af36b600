"""Test support for Powerband and for external adapters: the golden server and the adapter contract."""
