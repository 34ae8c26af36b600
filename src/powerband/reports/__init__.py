"""Renderings for people: `console` for a terminal, `html` for a browser."""
