"""The end of a certificate is read from its file, as the library that made it says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tinsmith_runtime.observability.certificates import expiry_time_s


def _certificate(end: datetime) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pod" * 20)])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=400))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize("year", [1999, 2026, 2049, 2050, 2120])
def test_the_end_of_a_certificate_is_found(year: int) -> None:
    end = datetime(year, 3, 4, 5, 6, 7, tzinfo=UTC)
    assert expiry_time_s(_certificate(end)) == end.timestamp()


def test_the_first_of_a_chain_counts() -> None:
    ends = [datetime(2031, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC)]
    assert expiry_time_s("".join(map(_certificate, ends))) == ends[0].timestamp()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n",
        _certificate(datetime(2030, 1, 1, tzinfo=UTC))[:300],
    ],
)
def test_what_is_no_certificate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        expiry_time_s(text)
