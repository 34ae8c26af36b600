"""What all tests share."""

pytest_plugins = ["support.quiet"]
