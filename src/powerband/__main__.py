"""The program's first lines: `powerband` and `python -m powerband`."""

import signal


def main() -> None:
    """Let Ctrl-C end the process until a command handles it; a shell may have left the signal ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from powerband.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
