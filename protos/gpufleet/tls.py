"""Credentials of both ends. Mutual TLS from files; plain text on loopback or by an explicit flag."""

import ipaddress
from pathlib import Path

import grpc
import msgspec

from gpufleet.config import ConfigError


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths of one end's certificate files (PEM); all three or none.

    Attributes:
        ca: Certificates that sign the other end's certificate.
        cert: Our certificate chain.
        key: Our private key.
    """

    ca: str = ""
    cert: str = ""
    key: str = ""

    @property
    def on(self) -> bool:
        """Whether any path is set."""
        return bool(self.ca or self.cert or self.key)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials that demand a client certificate signed by `tls.ca`.

    Raises:
        ConfigError: A file is missing, unreadable or not PEM.
    """
    ca, cert, key = _read(tls)
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Credentials that show our certificate and trust `tls.ca` alone.

    Raises:
        ConfigError: A file is missing, unreadable or not PEM.
    """
    ca, cert, key = _read(tls)
    return grpc.ssl_channel_credentials(ca, key, cert)


def check_plain(address: str, insecure: bool, where: str) -> None:
    """Refuse plain text to or from anything but this machine.

    Raises:
        ConfigError: `address` is not loopback and `insecure` is not set.
    """
    if insecure or is_loopback(address):
        return
    raise ConfigError(
        f"{where}: {address} is not loopback and no [tls] is set: "
        "set tls.ca, tls.cert and tls.key, or insecure = true to send in plain text"
    )


def is_loopback(address: str) -> bool:
    """Whether `host:port` (or `unix:path`) stays on this machine."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(tls: Tls) -> tuple[bytes, bytes, bytes]:
    return (
        _pem(tls.ca, "tls.ca", b"CERTIFICATE"),
        _pem(tls.cert, "tls.cert", b"CERTIFICATE"),
        _pem(tls.key, "tls.key", b"PRIVATE KEY"),
    )


def _pem(path: str, key: str, label: bytes) -> bytes:
    if not path:
        raise ConfigError(f"{key}: not set: mutual TLS needs tls.ca, tls.cert and tls.key")
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error
    if label not in data:
        raise ConfigError(f"{key}: {path} holds no PEM {label.decode()}")
    return data
