"""When a certificate ends, read from its file.

Python's `ssl` tells it of certificates of a peer alone, and a pod has no other library for X.509.
The place of the validity is fixed, so that a few steps through the DER structure find it.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from tinsmith_runtime.observability.metrics import CERTIFICATE_EXPIRY

_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_END = "-----END CERTIFICATE-----"


class _Element:
    """One element of DER: its tag, and the elements within it."""

    def __init__(self, data: bytes) -> None:
        self.tag = data[0]
        length, header = data[1], 2
        if length & 0x80:
            header += length & 0x7F
            length = int.from_bytes(data[2:header], "big")
        self.content = data[header : header + length]
        if len(self.content) != length:
            raise ValueError("an element is cut")
        self.size = header + length

    def elements(self) -> list[_Element]:
        found, position = [], 0
        while position < len(self.content):
            found.append(_Element(self.content[position:]))
            position += found[-1].size
        return found


def expiry_time_s(pem: str) -> float:
    """Return when the first certificate of a file ends, in seconds since the epoch.

    Args:
        pem: Text of the file.

    Raises:
        ValueError: If it is no certificate.
    """
    first = pem[: pem.find(_END) + len(_END)]
    start = first.find("-----BEGIN CERTIFICATE-----")
    try:
        certificate = _Element(ssl.PEM_cert_to_DER_cert(first[max(start, 0) :]))
        fields = certificate.elements()[0].elements()
        # Version (optional), serial number, algorithm, issuer, validity.
        validity = fields[3 + (fields[0].tag == _VERSION)]
        _, end = validity.elements()
        if validity.tag != _SEQUENCE or end.tag not in (_UTC_TIME, _GENERALIZED_TIME):
            raise ValueError("there is no validity where it belongs")
    except IndexError as error:
        raise ValueError("an element is missing") from error
    text = end.content.decode("ascii")
    if end.tag == _UTC_TIME:
        # Two digits of the year: 50 to 99 are of the last century (RFC 5280, 4.1.2.5.1).
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def note_certificate(use: str, pem: str) -> None:
    """Tell the metrics when a certificate ends that is used from now on."""
    try:
        CERTIFICATE_EXPIRY.labels(use).set(expiry_time_s(pem))
    except ValueError:
        # What uses it refuses it too, and says so.
        CERTIFICATE_EXPIRY.labels(use).set(0)
