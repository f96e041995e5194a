"""How long a certificate holds, read from its file."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet.tls import _element, validity

CA = trustme.CA()


@pytest.mark.parametrize("until", [datetime(2031, 4, 5, 6, 7, 8), datetime(2051, 1, 2, 3, 4, 5)])
def test_the_first_certificate_of_a_chain_counts(tmp_path: Path, until: datetime) -> None:
    before = datetime(2020, 1, 2, 3, 4, 5)
    issued = CA.issue_cert(
        "agent", not_before=before.replace(tzinfo=UTC), not_after=until.replace(tzinfo=UTC)
    )
    path = tmp_path / "agent.pem"
    path.write_bytes(b"the agent's\n" + b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    assert validity(str(path)) == (before, until)


def test_what_is_no_certificate(tmp_path: Path) -> None:
    path = tmp_path / "agent.pem"
    with pytest.raises(FileNotFoundError):
        validity(str(path))
    for text in ("", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----", "\xff\xfe"):
        path.write_text(text, "latin-1")
        with pytest.raises(ValueError, match="certificate"):
            validity(str(path))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 310))
def test_any_bytes_are_an_element_or_an_error(der: bytes, at: int) -> None:
    try:
        _, begin, end = _element(der, at)
    except ValueError:
        return
    assert at < begin <= end <= len(der)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 600), st.integers(0, 255))
def test_a_damaged_certificate_is_times_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    import ssl

    der = bytearray(ssl.PEM_cert_to_DER_cert(CA.cert_pem.bytes().decode()))
    der[place % len(der)] = byte
    path = tmp_path_factory.mktemp("tls") / "agent.pem"
    path.write_text(ssl.DER_cert_to_PEM_cert(bytes(der)))
    try:
        since, until = validity(str(path))
    except ValueError:
        return
    assert isinstance(since, datetime)
    assert isinstance(until, datetime)
