"""One host with cards of several makers: each maker's driver is asked for its own cards."""

from collections.abc import Iterable, Mapping, Sequence

from gpufleet.event import Event
from gpufleet.metric import Row, Value
from gpufleet_agent.drivers import BenchResult, Check, DriverError, Gpu, Host, Item, Process, go_on

_PER_DRIVER = ("driver", "driver_version")


class CompositeHost:
    """Several drivers of one machine. What is not about a card is asked of the first.

    Args:
        hosts: One per driver, at least one; they read the same machine.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = tuple(hosts)

    @property
    def epoch(self) -> int:
        """Moves when any driver is initialised anew."""
        return sum(host.epoch for host in self._hosts)

    @property
    def boot_id(self) -> str:
        """Of the running boot."""
        return self._hosts[0].boot_id

    def node(self) -> Item:
        """The host itself; what each driver says of itself is joined."""
        items = [host.node().attributes for host in self._hosts]
        merged: dict[str, str] = {}
        for item in reversed(items):
            merged.update(item)
        for name in _PER_DRIVER:
            said = [item[name] for item in items if name in item]
            present = [words for words in said if not words.startswith("no ")]
            if said:
                merged[name] = ", ".join(present or said[:1])
        return Item("node:", merged)

    def read(self, group: str) -> Row:
        """Host-wide metrics of one group."""
        return self._hosts[0].read(group)

    def rows(self, group: str) -> Iterable[Row]:
        """Things of the host of one group, one row each."""
        return self._hosts[0].rows(group)

    def gpus(self) -> Sequence[Gpu]:
        """The cards of all drivers.

        A driver that is gone does not take the cards of another with it: its own are then missing from a
        sweep that went well otherwise, as a card is that a driver refused.

        Raises:
            DriverGone: There are cards on the bus, but none in any driver.
        """
        found: list[Gpu] = []
        trouble: DriverError | None = None
        for host in self._hosts:
            try:
                found.extend(host.gpus())
            except DriverError as error:
                trouble = trouble or error
        if trouble is not None and not found:
            raise trouble
        return found

    def pci_devices(self) -> Iterable[Row]:
        """The bus, by sysfs."""
        return self._hosts[0].pci_devices()

    def kernel_log(self, cursor: str) -> tuple[Sequence[Event], str]:
        """Events of the kernel log after `cursor`."""
        return self._hosts[0].kernel_log(cursor)

    def processes(self) -> Sequence[Process]:
        """Processes that hold a card of any driver."""
        return [process for host in self._hosts for process in host.processes()]

    def process(self, pid: int) -> Row:
        """Who it belongs to, by /proc."""
        return self._hosts[0].process(pid)

    def run_bench(self, name: str, params: Mapping[str, Value], check: Check = go_on) -> BenchResult:
        """By the driver of the card that `pci` or `gpu_uuid` names, else by the first that can."""
        wanted = {params.get("pci"), params.get("gpu_uuid")} - {None}
        hosts = [host for host in self._hosts if _has(host, wanted)] if wanted else []
        result = BenchResult("unsupported", None, "", f"no driver can run {name}")
        for host in hosts or self._hosts:
            result = host.run_bench(name, params, check)
            if result.status != "unsupported":
                return result
        return result


def _has(host: Host, wanted: set[Value | None]) -> bool:
    try:
        return any(card.pci in wanted or card.uuid in wanted for card in host.gpus())
    except DriverError:
        return False
