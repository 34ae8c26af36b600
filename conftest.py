"""What all tests share."""

pytest_plugins = ["support.stolen", "support.cluster_fixtures"]
