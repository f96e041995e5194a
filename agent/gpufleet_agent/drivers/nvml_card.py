"""How one card is asked: handle, retries, what it is known not to have, and when it counts as lost.

Every answer is a value, a Null, or one of the errors of the host interface; whatever NVIDIA's library or its
binding raises ends here.
"""

import ctypes
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gpufleet.metric import Cell, Null, Reason
from gpufleet_agent.drivers import Hung, Lost, Progress
from gpufleet_agent.drivers.nvml_errors import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    IS_LOST,
    NOT_SUPPORTED,
    UNKNOWN,
    FailedError,
    Means,
    is_remembered,
    known,
    null,
)
from gpufleet_agent.drivers.nvml_values import Field, field_value, field_values

if TYPE_CHECKING:
    from gpufleet_agent.drivers.nvml import NvmlHost

log = logging.getLogger(__name__)

_RETRY_LOST_S = 10.0
_RETRY_S = 2.0
_REMEMBER_S = 86_400.0
_BATCH = "nvmlDeviceGetFieldValues"


class Library:
    """The library's functions by name, announced before they are called: any of them may not return."""

    def __init__(self, module: object, progress: Progress) -> None:
        self._module = module
        self._progress = progress
        self._garbled: set[tuple[str, str]] = set()

    def call(self, card: str, name: str, *args: object) -> object:
        """What the function returns. A text that is no UTF-8 comes as the bytes it is.

        Raises:
            FailedError: It answers with an error, or the binding does not have it.
        """
        function = getattr(self._module, name, None)
        if function is None:
            raise FailedError(FUNCTION_NOT_FOUND)
        self._progress.enter(card, name)
        try:
            return function(*args)
        except UnicodeDecodeError as error:
            if (card, name) not in self._garbled:
                self._garbled.add((card, name))
                log.warning("%s of %s is no text: %r", name, card or "the driver", error.object[:64])
            return error.object
        except Exception as error:
            code = getattr(error, "value", None)
            if isinstance(code, int):
                raise FailedError(code) from error
            if type(error).__name__ == "NVMLLibraryMismatchError":  # what the binding calls a missing symbol
                raise FailedError(FUNCTION_NOT_FOUND) from error
            # a structure that the binding does not expect
            raise FailedError(0, type(error).__name__) from error
        finally:
            self._progress.leave()


class Card:
    """The library's view of one card, until the library is initialised anew."""

    def __init__(self, host: "NvmlHost", index: int, pci: str) -> None:
        self.index = index
        self.pci = pci
        self._host = host
        self._handle: object = None
        self._trouble: FailedError | None = None
        self._ask_again = 0.0
        self._unknowns = 0
        self._absent: dict[str, tuple[Null, float]] = {}
        self._denied: set[str] = set()

    @property
    def library(self) -> Library:
        """For what is asked without a handle."""
        return self._host.library

    def clock(self) -> float:
        """Monotonic seconds."""
        return self._host.clock()

    @property
    def lost(self) -> bool:
        """Whether it was lost when it was asked last."""
        return self._trouble is not None and self._is_lost(self._trouble)

    def attach(self, handle: object) -> None:
        """Use this handle from now on."""
        self._handle, self._trouble, self._unknowns = handle, None, 0

    def detach(self, trouble: FailedError) -> None:
        """The card did not answer; it is asked for a handle again after a while."""
        self._handle, self._trouble = None, trouble
        self._unknowns += trouble.code == UNKNOWN
        sure = known(trouble.code).lost and (trouble.code != UNKNOWN or self._is_lost(trouble))
        self._ask_again = self._host.clock() + (_RETRY_LOST_S if sure else _RETRY_S)

    def forget(self, of: str = "") -> None:
        """Ask again for what it is known not to have, where the key begins so: it was set up differently."""
        self._absent = {key: known for key, known in self._absent.items() if not key.startswith(of)}

    def refused(self) -> Null | None:
        """See to it that the card has a handle; else why it may not be asked.

        Raises:
            Lost, Hung: It has none.
        """
        if self.pci in self._host.skip:
            raise Hung("hung", f"{self.pci} is left alone")
        if self._trouble is not None and self._host.clock() >= self._ask_again:
            self._find()
        if self._trouble is None:
            return None
        if self._is_lost(self._trouble):
            raise self._lost(self._trouble)
        return null(self._trouble)

    def ask(self, name: str, *args: object, key: str = "") -> object:
        """What the function says about this card, or a Null.

        Args:
            name: Of the function.
            args: Its arguments after the handle.
            key: Under which it is remembered that the card has no such thing; by default name and arguments.

        Raises:
            Lost: The card is gone.
            DriverGone: The driver is.
        """
        key = key or (f"{name}{args}" if args else name)
        remembered = self._remembered(key)
        if remembered is not None:
            return remembered
        if self._trouble is not None:  # lost its handle in the middle of a sweep
            return null(self._trouble)
        try:
            return self._call(name, *args)
        except FailedError as trouble:
            return self._failed(key, trouble)

    def either(self, name: str, older: str, *args: object) -> object:
        """A function, or where the driver does not have it, what it was called before."""
        found = self.ask(name, *args)
        if isinstance(found, Null) and found.reason is Reason.NOT_SUPPORTED:
            return self.ask(older, *args)
        return found

    def filled(self, name: str, struct: ctypes.Structure) -> object:
        """A structure that the function fills, or a Null."""
        # the binding hands it on as it is, and by value it would arrive as a wild pointer
        answer = self.ask(name, ctypes.pointer(struct), key=f"{name} {type(struct).__name__}")
        return answer if isinstance(answer, Null) else struct

    def fields(self, wanted: Iterable[Field], batch: str = _BATCH) -> dict[str, Cell]:
        """Fields in one call, by our names. What the card is known not to have is not asked for.

        Args:
            wanted: The fields; each name once.
            batch: Under which it is remembered that the card has none of them.

        Raises:
            Lost: The card is gone.
            DriverGone: The driver is.
        """
        found: dict[str, Cell] = {}
        ask: list[Field] = []
        none = self._remembered(batch)
        for field in wanted:
            remembered = none or self._remembered(_field_key(field))
            found[field.name] = remembered or Null(Reason.NOT_READ)
            if remembered is None:
                ask.append(field)
        if ask:
            found.update(self._batch(ask, batch))
        return found

    def _batch(self, fields: Sequence[Field], batch: str) -> Mapping[str, Cell]:
        numbers = [field.id if field.scope is None else (field.id, field.scope) for field in fields]
        if self._trouble is not None:
            return dict.fromkeys((field.name for field in fields), null(self._trouble))
        try:
            answer = self._call(_BATCH, numbers)
        except FailedError as trouble:
            if trouble.code == INVALID_ARGUMENT and len(fields) > 1:
                # an old driver may refuse them all for one that it does not know
                middle = len(fields) // 2
                return {**self._batch(fields[:middle], batch), **self._batch(fields[middle:], batch)}
            if trouble.code == INVALID_ARGUMENT:
                unknown = FailedError(NOT_SUPPORTED, str(trouble))
                return {fields[0].name: self._failed(_field_key(fields[0]), unknown)}
            return dict.fromkeys((field.name for field in fields), self._failed(batch, trouble))
        by_number = {(field.id, field.scope or 0): field for field in fields}
        found: dict[str, Cell] = {}
        for value in field_values(answer):
            field = by_number.get((getattr(value, "fieldId", -1), getattr(value, "scopeId", 0)))
            if field is not None:
                found[field.name] = self._field(field, value)
        return found

    def _field(self, field: Field, value: object) -> Cell:
        try:
            raw = field_value(value)
        except FailedError as trouble:
            if trouble.code == INVALID_ARGUMENT:  # a field that this driver is too old for
                trouble = FailedError(NOT_SUPPORTED, str(trouble))
            return self._failed(_field_key(field), trouble)
        return field.cell(raw)

    def _remembered(self, key: str) -> Null | None:
        known_absent = self._absent.get(key)
        if known_absent is None:
            return None
        if self._host.clock() < known_absent[1]:
            return known_absent[0]
        del self._absent[key]
        return None

    def _failed(self, key: str, trouble: FailedError) -> Null:
        """What a failed call leaves: a Null, unless it shows that the card or the driver is gone."""
        found = known(trouble.code)
        if found.restart:
            raise self._host.drop(trouble) from trouble
        if is_remembered(trouble.code):
            self._absent[key] = (null(trouble), self._host.clock() + _REMEMBER_S)
        elif trouble.code == IS_LOST or (trouble.code == UNKNOWN and self._is_seen_to_be_gone()):
            self.detach(trouble)
        elif found.means is Means.SUSPECT:
            # one sensor may say "unknown" on a sound card; a card that fell gives no handle either
            self._find()
        elif found.means is Means.CONFIG and key not in self._denied:
            self._denied.add(key)
            log.warning("%s of %s may not be read: %s", key, self.pci, found.name)
        if self._trouble is not None and self._is_lost(self._trouble):
            raise self._lost(self._trouble) from trouble
        return null(trouble)

    def _call(self, name: str, *args: object) -> object:
        """Call, and once more where the library does not know what is wrong.

        Raises:
            FailedError: It answers with an error.
        """
        try:
            return self._host.library.call(self.pci, name, self._handle, *args)
        except FailedError as trouble:
            if known(trouble.code).means is not Means.SUSPECT:
                raise
        return self._host.library.call(self.pci, name, self._handle, *args)

    def _find(self) -> None:
        """Ask for a handle, by address: that touches no other card."""
        try:
            if self.pci:
                self.attach(self._host.library.call(self.pci, "nvmlDeviceGetHandleByPciBusId", self.pci))
            else:
                self.attach(self._host.library.call("", "nvmlDeviceGetHandleByIndex", self.index))
        except FailedError as trouble:
            self.detach(trouble)

    def _is_lost(self, trouble: FailedError) -> bool:
        """Whether a failed handle means a lost card; "unknown" does when repeated, or when others agree."""
        if trouble.code == UNKNOWN:
            return self._unknowns > 1 or self._is_seen_to_be_gone()
        return bool(known(trouble.code).lost)

    def _is_seen_to_be_gone(self) -> bool:
        """What the bus and the kernel log say, which do not ask the library."""
        return not self._host.sysfs.answers(self.pci) or self._host.fell(self.pci)

    def _lost(self, trouble: FailedError) -> Lost:
        code = known(trouble.code).lost
        if trouble.code == UNKNOWN and self._is_seen_to_be_gone():
            code = "fallen_off_bus"
        return Lost(code, f"{self.pci or 'a card'} does not answer: {trouble}")


def _field_key(field: Field) -> str:
    return f"field {field.id}" if field.scope is None else f"link {field.scope} field {field.id}"
