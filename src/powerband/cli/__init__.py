"""The command line: one file per verb. Parse, call one stage, render, exit."""
