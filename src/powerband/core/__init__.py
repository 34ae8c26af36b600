"""The nouns: frozen values without I/O, one file each."""
