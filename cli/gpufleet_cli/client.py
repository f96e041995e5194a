"""The collector, as verbs see it: a request in, a document out. gRPC errors become text here."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from gpufleet_cli import errors
from gpufleet_cli.errors import FleetError
from gpufleet_cli.settings import Settings

if TYPE_CHECKING:
    import grpc

HINT = "\n"
"""Between what happened and what to do next in the text of a collector's refusal."""

Json = dict[str, object]
Answer = TypeVar("Answer")


class Chunk(Protocol):
    """A response that carries a part of a document."""

    @property
    def json(self) -> bytes:
        """The part."""


class Client:
    """A connection to one collector. Loads gRPC when it is made, not before. Use as a context manager."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._channel = _channel(settings)
        from gpufleet.v1.fleet_pb2_grpc import FleetServiceStub

        self.stub = FleetServiceStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def document(
        self, call: Callable[..., Iterable[Chunk]], request: object, least_timeout: float = 0.0
    ) -> Json:
        """The whole document of a streamed reply; `least_timeout` is for what takes its time.

        Raises:
            FleetError: The collector did not answer, or said no.
        """
        timeout = max(self.settings.timeout, least_timeout)
        whole = self.guard(lambda: b"".join(chunk.json for chunk in call(request, timeout=timeout)), timeout)
        found = json.loads(whole)
        if not isinstance(found, dict):
            raise FleetError("bad_reply", "the collector's reply is no document", "", errors.INTERNAL)
        return found

    def one(self, call: Callable[..., Answer], request: object) -> Answer:
        """The reply of a plain call.

        Raises:
            FleetError: The collector did not answer, or said no.
        """
        return self.guard(lambda: call(request, timeout=self.settings.timeout))

    def stream(
        self, call: Callable[..., Iterable[Answer]], request: object, timeout: float
    ) -> Iterator[Answer]:
        """The replies of a streamed call, as they come.

        Raises:
            FleetError: The collector did not answer, or said no.
        """
        replies = iter(call(request, timeout=timeout))
        while True:
            reply = self.guard(lambda: next(replies, None))
            if reply is None:
                return
            yield reply

    def guard(self, ask: Callable[[], Answer], timeout: float = 0.0) -> Answer:
        """What `ask` gives; a gRPC error becomes a `FleetError`. It has `timeout` seconds, 0 = the usual."""
        import grpc

        try:
            return ask()
        except grpc.RpcError as error:
            raise _translate(error, self.settings.server, timeout or self.settings.timeout) from None


def _channel(settings: Settings) -> "grpc.Channel":
    import grpc

    from gpufleet import tls
    from gpufleet.config import ConfigError

    files = tls.Tls(ca=settings.ca, cert=settings.cert, key=settings.key)
    try:
        if files.on:
            return grpc.secure_channel(settings.server, tls.channel_credentials(files))
        tls.check_plain(settings.server, settings.insecure, "--server")
    except ConfigError as error:
        text = re.sub(r"\btls\.(ca|cert|key)\b", r"--\1", str(error)).replace(
            "--ca, --cert and --key, or insecure = true", "--ca, --cert and --key, or --insecure"
        )
        raise FleetError(
            "credentials", text.replace("no [tls] is set", "no certificate is given"), "", errors.AUTH
        ) from None
    return grpc.insecure_channel(settings.server)


def _translate(error: "grpc.RpcError", server: str, waited: float) -> FleetError:
    import grpc

    if not isinstance(error, grpc.Call):
        return FleetError("internal", str(error), "", errors.INTERNAL)
    status, text = error.code(), error.details() or ""
    if status is grpc.StatusCode.UNAVAILABLE:
        return _unreachable(server, text)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED and text.strip().lower() in ("deadline exceeded", ""):
        return FleetError(
            "unreachable",
            f"the collector at {server} did not answer within {waited:g} s",
            f"it may be busy or paused: try --timeout {max(30, 2 * waited):g}, "
            "or see its log (journalctl -u gpufleet-collector)",
            errors.UNREACHABLE,
        )
    code, exit_code = {
        grpc.StatusCode.INVALID_ARGUMENT: ("invalid", errors.USAGE),
        grpc.StatusCode.UNAUTHENTICATED: ("not_authenticated", errors.AUTH),
        grpc.StatusCode.PERMISSION_DENIED: ("not_allowed", errors.AUTH),
        grpc.StatusCode.NOT_FOUND: ("not_found", errors.NOT_FOUND),
        grpc.StatusCode.FAILED_PRECONDITION: ("refused", errors.REFUSED),
        grpc.StatusCode.ABORTED: ("conflict", errors.REFUSED),
        grpc.StatusCode.ALREADY_EXISTS: ("conflict", errors.REFUSED),
        grpc.StatusCode.DEADLINE_EXCEEDED: ("time_limit", errors.REFUSED),
        grpc.StatusCode.UNIMPLEMENTED: ("not_supported", errors.INTERNAL),
    }.get(status, ("internal", errors.INTERNAL))
    text, _, hint = text.partition(HINT)
    if status is grpc.StatusCode.UNIMPLEMENTED:
        text, hint = (
            f"the collector at {server} does not know this call",
            "it may be older than this fleet: see fleet version",
        )
    return FleetError(code, text or status.name.lower(), hint, exit_code)


def _unreachable(server: str, text: str) -> FleetError:
    """Name the step that failed: a port that nobody listens on, a name, or a certificate."""
    low = text.lower()
    if any(
        word in low for word in ("certificate_verify_failed", "handshake", "ssl", "hostname verification")
    ):
        return FleetError(
            "tls",
            f"the collector at {server} was reached, but its certificate or ours is not accepted",
            f"check --ca, --cert and --key ({_short(text)})",
            errors.AUTH,
        )
    if "socket closed" in low or "connection reset" in low:
        hint = "it may want a certificate (--ca, --cert, --key), or it just stopped"
    elif "dns" in low or "resolve" in low or "domain name" in low:
        hint = "the name does not resolve: check --server or GPUFLEET_SERVER"
    else:
        hint = "is fleet-collector running there? check --server or GPUFLEET_SERVER"
    return FleetError("unreachable", f"cannot reach the collector at {server}", hint, errors.UNREACHABLE)


def _short(text: str) -> str:
    return " ".join(text.split())[:160]
