"""The collector's own certificate: how long it holds, hourly in table `certificate`; a rule judges it."""

import asyncio
import logging

from gpufleet.tls import Tls, validity
from gpufleet_collector.state import from_us, now_us
from gpufleet_collector.store import Store, StoreBroken

log = logging.getLogger(__name__)

EVERY_S = 3600.0


async def watch(store: Store, tls: Tls) -> None:
    """For ever; the file may be renewed meanwhile."""
    while True:
        try:
            await asyncio.to_thread(note, store, tls)
        except StoreBroken:
            log.debug("certificate: the store is broken, next time")
        except (OSError, ValueError) as error:
            log.warning("tls.cert cannot be read: %s", error)
        await asyncio.sleep(EVERY_S)


def note(store: Store, tls: Tls) -> None:
    """Write what the file says now.

    Raises:
        OSError, ValueError: It cannot be read; what was noted stays.
    """
    held = validity(tls.cert) if tls.on else None
    with store.transaction() as write:
        write.execute("DELETE FROM live.certificate")
        if held is not None:
            write.execute("INSERT INTO live.certificate VALUES (?, ?, ?)", [*held, from_us(now_us())])
