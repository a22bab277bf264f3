"""TLS between hosts. The certificate follows from the cluster's secret.

Both sides derive the same Ed25519 key from the secret, and from it, byte for byte, the same
self-signed certificate: Ed25519 signatures are deterministic. Each side presents it and trusts it
alone, so nothing but the secret has to travel, and whoever lacks it does not get past the handshake
of TLS. Sessions use TLS 1.3, whose keys are ephemeral: with the secret alone, what was recorded
earlier cannot be decrypted.
"""

from __future__ import annotations

import datetime
import functools
import hmac
import importlib
import os
import ssl
import sys
import tempfile
from typing import Any, Final

from rlinf_async.channels.errors import WireError

LABEL: Final = b"rlinf_async: key of the cluster's certificate"
NAME: Final = "rlinf-async-cluster"
FROM, UNTIL = datetime.datetime(2020, 1, 1), datetime.datetime(2120, 1, 1)
"""fixed, as all of the certificate is: a clock that is off by minutes ends no connection"""


@functools.lru_cache(maxsize=8)
def server_context(secret: bytes) -> ssl.SSLContext:
    """The context of the side that listens.

    Raises:
        WireError: `cryptography`, which makes the certificate, is not installed.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER, secret)


@functools.lru_cache(maxsize=8)
def client_context(secret: bytes) -> ssl.SSLContext:
    """The context of the side that connects.

    Raises:
        WireError: as `server_context`.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, secret)


def _context(protocol: Any, secret: bytes) -> ssl.SSLContext:
    key, certificate = make_certificate(secret)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # hosts have many names; the certificate is the cluster's
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    _load(context, key + certificate)
    return context


def make_certificate(secret: bytes) -> tuple[bytes, bytes]:
    """Private key and certificate of the cluster with this secret, as PEM.

    Raises:
        WireError: as `server_context`.
    """
    try:
        x509: Any = importlib.import_module("cryptography.x509")
        ed25519: Any = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
        serialization: Any = importlib.import_module("cryptography.hazmat.primitives.serialization")
    except ImportError as error:
        raise WireError(
            f"TLS needs the package cryptography ({error}): pip install 'rlinf_async[tls]' on "
            "every host"
        ) from error
    key = ed25519.Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, LABEL, "sha256"))
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(FROM)
        .not_valid_after(UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(pem)


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Load key and certificate, which `ssl` reads from a file: on Linux one in memory, elsewhere
    one that only this user can read, for this moment."""
    if sys.platform != "linux":
        with tempfile.NamedTemporaryFile() as stored:
            stored.write(pem)
            stored.flush()
            context.load_cert_chain(stored.name)
        return
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
