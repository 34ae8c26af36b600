"""Autoscaling: the policy that `serve` runs, its simulator, and bounds on what any policy could cost."""
