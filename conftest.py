"""What all tests share."""

pytest_plugins = ["support.quiet", "support.cluster_fixtures"]
