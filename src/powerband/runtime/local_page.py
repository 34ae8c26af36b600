"""Read a page of a server on this machine, for supervisors that probe hundreds: httpx takes six times the CPU."""

from __future__ import annotations

import asyncio

import h11

MAX_BYTES = 16 * 2**20  # vLLM's page has about 0.1 MB


async def read(host: str, port: int, path: str) -> str:
    """Return the body, or nothing if the status is not 200; wait as long as the server needs. Raise OSError."""
    connection, status, body = h11.Connection(h11.CLIENT), 0, b""
    headers = [("host", f"{host}:{port}"), ("connection", "close")]
    request = connection.send(h11.Request(method="GET", target=path, headers=headers))
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write((request or b"") + (connection.send(h11.EndOfMessage()) or b""))
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(2**16))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BYTES:
                    raise ConnectionResetError(f"{host}:{port}{path} has more than {MAX_BYTES:,} bytes")
    except h11.RemoteProtocolError as error:  # such as an end in the middle
        raise ConnectionResetError(f"{host}:{port}: {error}") from None
    finally:
        writer.close()
    return body.decode(errors="replace") if status == 200 else ""
