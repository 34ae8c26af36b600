"""`python -m powerband` is `powerband`."""

from powerband.cli.main import main

main()
