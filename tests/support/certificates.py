"""Certificates for tests, signed by an authority of theirs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID


class Certificate(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path


def authority(folder: Path) -> Certificate:
    """Who signs the others."""
    return _made(folder, "authority", None)


def signed(folder: Path, by: Certificate, name: str) -> Certificate:
    """One for `name`, which is no address of this machine."""
    return _made(folder, name, by)


def _made(folder: Path, name: str, by: Certificate | None) -> Certificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer = x509.load_pem_x509_certificate(by.certificate.read_bytes()).subject if by else subject
    signer = load_pem_private_key(by.key.read_bytes(), None) if by else key
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=9))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    )
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    made.certificate.write_bytes(builder.sign(signer, SHA256()).public_bytes(Encoding.PEM))  # type: ignore[arg-type]
    made.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made
