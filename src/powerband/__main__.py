"""Entry point of `powerband` and `python -m powerband`."""

import signal


def main() -> None:
    """Run the command line; Ctrl-C ends the process until a command handles it, even if a shell ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from powerband.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
