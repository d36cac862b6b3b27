"""A relay between a client and a server: it forwards everything, but can lose answers."""

from __future__ import annotations

import asyncio


class Relay:
    """A relay at its own port, for the length of the block.

    Args:
        port: the server's port on this machine.
        loses: a request with this text gets no answer: its connection is closed when the answer arrives.
        host: where it listens.
    """

    def __init__(self, port: int, loses: bytes = b"", host: str = "127.0.0.1") -> None:
        self._port, self._loses, self._host = port, loses, host
        self.losses = 0
        self.ends = list[asyncio.StreamWriter]()

    async def __aenter__(self) -> str:
        """Its endpoint."""
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for end in self.ends:
            end.close()
        # Data that arrives before a socket is really closed would cause a reset.
        await asyncio.gather(*(end.wait_closed() for end in self.ends), return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("localhost", self._port)
        self.ends += [writer, outer]
        asked = bytearray()

        async def ask() -> None:
            while data := await reader.read(1 << 16):
                asked.extend(data)
                outer.write(data)
            outer.close()

        async def answer() -> None:
            while data := await inner.read(1 << 16):
                if self._loses and self._loses in asked:
                    self.losses += 1
                    break
                asked.clear()
                writer.write(data)
            writer.close()

        await asyncio.gather(ask(), answer(), return_exceptions=True)
        outer.close()
