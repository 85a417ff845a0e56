"""Limits on connections that send no complete request.

A client may open connections and send nothing, or half of its headers or body. Such connections
cost file descriptors and would keep honest clients out. So a connection has `HEADER_SECONDS` to
send complete headers; at most `MAX_WAITING` connections wait for the rest of a request at once, and
a further one replaces the oldest of the client (IP address) that has most; and a body that is
incomplete when the server stops is given up.
"""

import asyncio
import socket
from collections import Counter

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
# With the requests that may run they need fewer than 1,024 file descriptors, the usual limit.
MAX_WAITING = 400
# Few are accepted at once: a new connection is read before so many others come that it is replaced.
ACCEPTED_AT_ONCE = 64
BACKLOG = 1024  # connections that wait in the kernel


class LimitedServer(uvicorn.Server):
    """asyncio accepts as many connections at once as wait in the kernel, unless it is set later."""

    def __init__(self, config: uvicorn.Config) -> None:
        config.backlog = ACCEPTED_AT_ONCE
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)


def address_of(connection: H11Protocol) -> str | None:
    return connection.client[0] if connection.client else None


def limited_protocol(
    header_seconds: float = HEADER_SECONDS, max_waiting: int = MAX_WAITING
) -> type[H11Protocol]:
    """The protocol class of one server, for `uvicorn.Config(http=...)`."""
    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # in the order in which they began to wait

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.SEND_BODY:
                self._wait()
                waiting[self].cancel()  # the time of a body is limited by `Guard`
            elif self.cycle is None or self.cycle.response_complete:
                self._wait()
            else:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def shutdown(self) -> None:
            if self.conn.their_state is h11.SEND_BODY:
                self.transport.abort()  # the rest of the body may never come
            else:
                super().shutdown()

        def _wait(self) -> None:
            """Start the clock of a request; it does not restart with every byte."""
            if self not in waiting:
                if len(waiting) >= max_waiting:
                    addresses = Counter(map(address_of, waiting))
                    busiest = max(addresses, key=lambda address: addresses[address])
                    oldest = next(p for p in waiting if address_of(p) == busiest)
                    waiting.pop(oldest).cancel()  # now: `connection_lost` comes later
                    oldest.transport.abort()
                waiting[self] = self.loop.call_later(header_seconds, self.transport.abort)

        def _stop_waiting(self) -> None:
            timer = waiting.pop(self, None)
            if timer is not None:
                timer.cancel()

    return LimitedProtocol
