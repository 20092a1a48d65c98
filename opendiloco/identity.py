"""Who a peer is: the RSA key that p2pd and the signatures of DHT records share."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey

from opendiloco.errors import ConfigError

_SHA256_MULTIHASH = b"\x12\x20"


@dataclass(frozen=True)
class Identity:
    """A peer's name in the swarm and the key that proves it.

    Attributes:
        path: The key file, as p2pd reads it.
        peer_id: The libp2p peer id that follows from the key, in base58.
        private_key: Signs this peer's records in the DHT.
    """

    path: Path
    peer_id: str
    private_key: RSAPrivateKey


def load_or_create_identity(path: Path, *, option: str = "--identity") -> Identity:
    """Return the identity in a file, which is created with a new key when there is none.

    Two peers that start at once with the same path get the same identity.

    Args:
        path: The key file; missing folders are created. A new file is readable by its owner only.
        option: The setting that the path came from, for messages.

    Raises:
        ConfigError: If the file holds no usable key, or cannot be read or created.
    """
    try:
        if not path.exists():
            _create(path)
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot use {path}: {error.strerror}; "
            "choose a file that this user can read and write"
        ) from None
    try:
        private_key = _private_key(content)
    except (DecodeError, ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{option}: {path} holds no RSA key in libp2p's format; "
            "move it away to get a new identity, or choose another file"
        ) from None
    public_key = private_key.get_public_key().to_bytes()
    return Identity(path=path, peer_id=peer_id_of_public_key(public_key), private_key=private_key)


@contextlib.contextmanager
def hold_identity(identity: Identity, *, option: str = "--identity") -> Iterator[None]:
    """Keep other processes of this machine from being the same peer.

    Args:
        identity: Who this peer is.
        option: The setting that the key file came from, for messages.

    Raises:
        ConfigError: If another process holds it.
    """
    with identity.path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{option}: {identity.path} is in use by another process; "
                "give each peer a folder of its own with --out-dir"
            ) from None
        yield


def peer_id_of_public_key(ssh_public_key: bytes) -> str:
    """Return the libp2p peer id, in base58, of whoever holds the private half of a key.

    Args:
        ssh_public_key: `ssh-rsa AAAA...`, as in the owner tags of hivemind's signed records.

    Raises:
        ValueError: If this is no RSA public key.
    """
    try:
        public_key = load_ssh_public_key(ssh_public_key)
    except UnsupportedAlgorithm as error:
        raise ValueError("not an RSA public key") from error
    if not isinstance(public_key, RSAPublicKey):
        raise ValueError("not an RSA public key")  # noqa: TRY004 - the type of key is a value here
    der = public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    message = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    return str(PeerID(_SHA256_MULTIHASH + hashlib.sha256(message).digest()))


def _private_key(content: bytes) -> RSAPrivateKey:
    message = crypto_pb2.PrivateKey.FromString(content)
    if message.key_type != crypto_pb2.RSA:
        raise ValueError("not an RSA key")
    # hivemind: 1.1.12 reads a key from bytes only when it unpickles one.
    private_key = RSAPrivateKey.__new__(RSAPrivateKey)
    private_key.__setstate__({"_private_key": message.data})
    if private_key.to_bytes() != message.data:
        raise ValueError("not the encoding that p2pd reads")
    return private_key


def _create(path: Path) -> None:
    """Write a new key so that the path never shows half a file and never an overwritten one."""
    message = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=RSAPrivateKey().to_bytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(message.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            pass  # somebody was faster: theirs is the identity
        except OSError:
            temporary.replace(path)  # a file system without hard links
    finally:
        temporary.unlink(missing_ok=True)
