"""The domain model: frozen values without I/O, one module each."""
