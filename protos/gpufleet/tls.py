"""Credentials of both ends. Mutual TLS from files; plain text on loopback or by an explicit flag."""

import ipaddress
import re
import ssl
from datetime import datetime
from pathlib import Path

import grpc
import msgspec

from gpufleet.config import ConfigError

_LARGEST = 1 << 20
"""Bytes of a file in which a certificate is looked for."""

_VERSION, _UTC_TIME, _LONG_TIME = 0xA0, 0x17, 0x18
"""Tags of DER."""


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
        ConfigError: A file is missing, unreadable or not PEM, or the key is another certificate's.
    """
    ca, cert, key = _read(tls)
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Credentials that show our certificate and trust `tls.ca` alone.

    Raises:
        ConfigError: A file is missing, unreadable or not PEM, or the key is another certificate's.
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


def validity(path: str) -> tuple[datetime, datetime]:
    """From when until when the first certificate of a PEM file holds, UTC without a zone.

    The standard library reads certificates only of a connection, so their few bytes are walked here.

    Raises:
        OSError: The file cannot be read.
        ValueError: There is no certificate in it that can be read.
    """
    text = Path(path).read_bytes()[:_LARGEST].decode("ascii", "replace")
    found = re.search(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", text, re.DOTALL)
    if not found:
        raise ValueError(f"{path}: no certificate")
    der = ssl.PEM_cert_to_DER_cert(found[0])
    _, whole, _ = _element(der, 0)
    _, at, _ = _element(der, whole)  # what was signed
    tag, _, after = _element(der, at)
    if tag == _VERSION:
        at = after
    for _ in ("serial number", "algorithm", "issuer"):
        at = _element(der, at)[2]
    _, at, end = _element(der, at)
    times: list[datetime] = []
    while at < end and len(times) < 2:
        tag, begin, at = _element(der, at)
        form = {_UTC_TIME: "%y%m%d%H%M%SZ", _LONG_TIME: "%Y%m%d%H%M%SZ"}.get(tag)
        if form is None:
            raise ValueError(f"{path}: no time where its validity should be")
        times.append(datetime.strptime(der[begin:at].decode("ascii", "replace"), form))
    if len(times) != 2:
        raise ValueError(f"{path}: no validity")
    return times[0], times[1]


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the DER element at `at`, where its content begins and where it ends."""
    if at + 2 > len(der):
        raise ValueError("the certificate is cut off")
    tag, size, begin = der[at], der[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size = int.from_bytes(der[begin : begin + count])
        begin += count
    if begin + size > len(der):
        raise ValueError("the certificate is cut off")
    return tag, begin, begin + size


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
    read = (_bytes(tls.ca, "tls.ca"), _bytes(tls.cert, "tls.cert"), _bytes(tls.key, "tls.key"))
    _check_certificate(tls.ca, "tls.ca")
    _check_certificate(tls.cert, "tls.cert")
    _check_key(tls)
    return read


def _bytes(path: str, key: str) -> bytes:
    if not path:
        raise ConfigError(f"{key}: not set: mutual TLS needs tls.ca, tls.cert and tls.key")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error


# gRPC takes any bytes and fails at each handshake, with a text that names no file: the standard library tells
# beforehand.


def _check_certificate(path: str, key: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{key}: {path} is not a PEM certificate") from error


def _check_key(tls: Tls) -> None:
    try:
        # without a password of ours OpenSSL would ask on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls.cert: {tls.cert} does not match its key, tls.key {tls.key}") from error
        if error.reason in ("EE_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
            raise ConfigError(f"tls.cert: {tls.cert} is too weak: its key or its hash") from error
        raise ConfigError(f"tls.key: {tls.key} is not a PEM private key without a password") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls.key: {tls.key} is not a PEM private key without a password") from error
