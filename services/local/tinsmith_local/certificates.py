"""Certificates of the pods, for machines that no cert-manager looks after.

One authority, kept in the folder, signs a certificate for each role. Done again, the authority
stays and the certificates are new: pods read changed files while they run. The private key of the
authority is needed for that alone, so it can be kept elsewhere between renewals.
"""

from __future__ import annotations

import datetime
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tinsmith.whole_files import write_whole
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.pod_identity import PodRole
from tinsmith_runtime.rpc.pod_tls import host_of, identity_uri

AUTHORITY_DAYS = 3650
_SKEW = datetime.timedelta(minutes=5)
"""How far the clocks of two machines may differ."""
_NOTHING = {
    "content_commitment": False,
    "key_encipherment": False,
    "data_encipherment": False,
    "key_agreement": False,
    "encipher_only": False,
    "decipher_only": False,
}


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate that was written.

    Attributes:
        role: Whose it is.
        folder: Where `tls.crt`, `tls.key` and `ca.crt` are.
        expire_time: When it ends.
    """

    role: str
    folder: Path
    expire_time: datetime.datetime


def make_certificates(
    folder: Path,
    *,
    namespace: str = "",
    days: float = 90.0,
    now: datetime.datetime | None = None,
) -> list[Issued]:
    """Write a certificate for each role, below a folder that keeps the authority.

    Args:
        folder: Gets `ca.crt`, `ca.key`, and a folder for each role.
        namespace: Stands in the certificates; empty outside of a cluster.
        days: How long they are valid.
        now: The time; that of the clock if it is None.

    Raises:
        ConfigError: If the authority in the folder is incomplete, or ends before they would.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    authority, authority_key = _authority(folder, now, end)
    issued = []
    for role in PodRole:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [
            x509.DNSName(host_of(role)),
            x509.UniformResourceIdentifier(identity_uri(role, namespace)),
        ]
        certificate = (
            _begun(role, authority.subject, key, now, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
                critical=False,
            )
            .sign(authority_key, hashes.SHA256())
        )
        place = folder / role
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place / "tls.key", _pem_of_key(key), is_secret=True)
        write_whole(
            place / "tls.crt", certificate.public_bytes(serialization.Encoding.PEM), is_secret=True
        )
        write_whole(place / "ca.crt", (folder / "ca.crt").read_bytes(), is_secret=True)
        issued.append(Issued(role, place, end))
    return issued


def _authority(
    folder: Path, now: datetime.datetime, end: datetime.datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate_file, key_file = folder / "ca.crt", folder / "ca.key"
    if certificate_file.exists() != key_file.exists():
        raise ConfigError(
            f"{folder} has ca.crt or ca.key but not both; put the other one back, or start with an "
            "empty folder"
        )
    if key_file.exists():
        certificate = x509.load_pem_x509_certificates(certificate_file.read_bytes())[0]
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{key_file} is no key on an elliptic curve; was it made elsewhere?")
        if certificate.not_valid_after_utc < end:
            raise ConfigError(
                f"the authority in {folder} ends on {certificate.not_valid_after_utc:%Y-%m-%d}, "
                "before the certificates would; make a new one in an empty folder"
            )
        return certificate, key
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    # Two authorities that are trusted at a time are told apart by their names and keys.
    common_name = f"Tinsmith pods {secrets.token_hex(4)}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **_NOTHING)
    certificate = (
        _begun(common_name, name, key, now, now + datetime.timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_whole(key_file, _pem_of_key(key), is_secret=True)
    write_whole(
        certificate_file, certificate.public_bytes(serialization.Encoding.PEM), is_secret=True
    )
    return certificate, key


def _begun(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(end)
    )


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
