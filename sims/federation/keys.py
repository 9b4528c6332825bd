"""Make the keys and certificates of a federation with the package `cryptography`.

An authority signs the server's certificate. A key identifies the node of each site.
"""

import base64
import datetime
import hashlib
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import NameOID

from fedloom.conf.errors import UserError, locked, plain
from fedloom.conf.sites import is_site_name
from fedloom.sims.federation.files import write_together

AUTHORITY, CERTIFICATE, SERVER_KEY = "ca.crt", "server.crt", "server.key"
NODE_KEY = "key"
LASTS = datetime.timedelta(days=3650)


def write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Write a new authority's certificate, and the server's certificate and key for these hosts, into the folder.

    The authority's private key is not stored, so that no one can make another certificate.
    """
    root, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer, subject = _name("Fedloom federation"), _name(hosts[0])
    authority = _certificate(issuer, issuer, root.public_key(), True, []).sign(root, hashes.SHA384())
    names = [_alternative(host) for host in hosts]
    certificate = _certificate(subject, issuer, key.public_key(), False, names).sign(root, hashes.SHA384())
    pem = serialization.Encoding.PEM
    write_together({
        folder / AUTHORITY: authority.public_bytes(pem),
        folder / CERTIFICATE: certificate.public_bytes(pem) + authority.public_bytes(pem),
        folder / SERVER_KEY: _private_bytes(key, serialization.PrivateFormat.PKCS8),
    })  # fmt: skip


class NodeKey:
    """A new key of a site, as from `ssh-keygen -t ecdsa -b 384`. `line`: the public half."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP384R1())
        public = self._key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        self.line = public.decode()

    def files(self, folder: Path) -> dict[Path, bytes]:
        """Return the key's files in a site's folder, the private half last."""
        private = _private_bytes(self._key, serialization.PrivateFormat.OpenSSH)
        return {folder / f"{NODE_KEY}.pub": f"{self.line}\n".encode(), folder / NODE_KEY: private}

    def signed(self, text: bytes) -> bytes:
        """Return this key's signature of a text (see clients.protocol.signatures.is_signed)."""
        return self._key.sign(text, ec.ECDSA(hashes.SHA384()))


def check_private(path: Path) -> None:
    """Raise UserError unless the file is a site's private key."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except TypeError:
        raise locked(path) from None
    except (OSError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: is not a site's key (from 'fedloom federation join'); name the right file, or restore it")


def check_certificate(path: Path) -> list[x509.Certificate]:
    """Return the certificates in a PEM file. Raises UserError if it has none."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        raise UserError(f"{path}: is not a certificate (PEM); name the right file, or restore it") from None


def check_validity(path: Path) -> datetime.datetime:
    """Return when a certificate ends. Raises UserError if it cannot be read, or is not valid at this moment."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path.name} cannot be read ({error}); restore it from the plan") from None
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begins <= datetime.datetime.now(datetime.UTC) <= ends:
        raise UserError(f"{path.name} is valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}; make a new plan, or set the clock")
    return ends


def check_pair(certificate: Path, key: Path, authority: Path) -> None:
    """Raise UserError unless a server's certificate belongs to its key, and the authority signed it."""
    chain, issuers = check_certificate(certificate), check_certificate(authority)
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except TypeError:
        raise locked(key, tls=True) from None
    except (OSError, ValueError, UnsupportedAlgorithm):
        raise UserError(f"{key}: is not a private key (PEM); name the right file, or restore it") from None
    if private.public_key() != chain[0].public_key():
        raise UserError(f"{certificate}: is not the certificate of the key {key}; restore both from the plan")
    if not any(_issued(link, issuer) for link in chain for issuer in issuers):
        raise UserError(f"{certificate}: is not from the authority {authority}; restore both from the plan")


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def public_key(line: str) -> str:
    """Return the key in an OpenSSH line, without its comment. Raises UserError for a key that is not ECDSA."""
    parts = line.split()
    try:
        key = load_ssh_public_key(" ".join(parts[:2]).encode("ascii"))
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"'{plain(line)[:60]}' is not a public key; takes a line in the format of 'ssh-keygen -t ecdsa'")
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def peers_in(path: Path) -> dict[str, str]:
    """Return the public keys in a file of peers, by site. Raises UserError unless each line is a site's name and its key."""
    try:
        lines = [line.split(None, 1) for line in path.read_text(encoding="ascii").splitlines() if line.strip()]
        known = {name: public_key(key) for name, key in lines if is_site_name(name)}
    except (OSError, ValueError):
        lines, known = [], {}
    if not known or len(known) < len(lines):
        raise UserError(
            f"{path}: is not a list of sites and their keys; takes a line NAME KEY for each site, each name once"
        )
    return known


def fingerprint(line: str) -> str:
    """Return the fingerprint of a public key, as `ssh-keygen -lf` prints it, for people to compare."""
    digest = hashlib.sha256(base64.b64decode(public_key(line).split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, authority: bool, names: Sequence[x509.GeneralName]
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + LASTS)  # clocks differ
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )  # fmt: skip
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False) if names else builder


def _private_bytes(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
