"""How answers are judged, one way per file: arithmetic only; the stage `evaluate` asks the engines."""
