"""The process of a relay, as a script: a fleet of hundreds has as many, so it imports nothing of the package.

    relay_process.py EXTENSION HOST PORT ENGINE_PORT

EXTENSION is the path of the compiled `_relay`.
"""

import importlib.machinery
import importlib.util
import signal
import socket
import sys


def main() -> None:
    """Listen, and relay until killed."""
    path, host, port, engine_port = sys.argv[1:]
    loader = importlib.machinery.ExtensionFileLoader("_relay", path)
    spec = importlib.util.spec_from_loader("_relay", loader)
    assert spec is not None
    relay = importlib.util.module_from_spec(spec)
    loader.exec_module(relay)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with socket.create_server((host, int(port)), backlog=1024) as listener:
        listener.setblocking(False)
        relay.run(listener.fileno(), int(engine_port))


if __name__ == "__main__":
    main()
