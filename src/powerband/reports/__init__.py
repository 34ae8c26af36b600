"""Reports: terminal tables and self-contained HTML pages."""
