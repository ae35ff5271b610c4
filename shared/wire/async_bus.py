"""The gateway's bus: receiving is awaited. Works on asyncio and uvloop; apart, because the engine's services need neither."""

from __future__ import annotations

import asyncio

from shared.wire.bus import DataLinks, Received


class AsyncBus(DataLinks):
    """``send`` never waits, ``receive`` does. One caller of ``receive`` at a time."""

    async def receive(self) -> Received:
        """The next message; bad and stale ones are dropped and counted."""
        while True:
            for inbox in self._inboxes:
                for frame in inbox.frames(1):
                    received = self.accept(frame)
                    if received is not None:
                        return received
            if not any(inbox.has_more for inbox in self._inboxes):
                await self._news()

    async def _news(self) -> None:
        loop = asyncio.get_running_loop()
        has_come = asyncio.Event()
        for inbox in self._inboxes:
            loop.add_reader(inbox.fd, has_come.set)
        try:
            await has_come.wait()
        finally:
            for inbox in self._inboxes:
                loop.remove_reader(inbox.fd)
