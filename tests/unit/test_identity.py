import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from opendiloco.errors import ConfigError
from opendiloco.identity import (
    hold_identity,
    load_or_create_identity,
    peer_id_of_public_key,
)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("identity") / "identity.key"
    load_or_create_identity(path)
    return path


def test_a_new_identity_has_the_peer_id_that_hivemind_derives_from_its_file(key_file: Path) -> None:
    identity = load_or_create_identity(key_file)

    assert identity.peer_id == PeerID.from_identity(key_file.read_bytes()).to_base58()


def test_an_identity_that_hivemind_made_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    P2P.generate_identity(str(path))

    identity = load_or_create_identity(path)

    assert identity.peer_id == PeerID.from_identity(path.read_bytes()).to_base58()


def test_an_identity_is_the_same_when_it_is_loaded_again(key_file: Path) -> None:
    first = load_or_create_identity(key_file)
    second = load_or_create_identity(key_file)

    assert first.private_key.to_bytes() == second.private_key.to_bytes()


def test_the_key_signs_what_the_public_key_of_the_file_verifies(key_file: Path) -> None:
    identity = load_or_create_identity(key_file)

    signature = identity.private_key.sign(b"a record")

    public_key = RSAPublicKey.from_bytes(identity.private_key.get_public_key().to_bytes())
    assert public_key.verify(b"a record", signature)


def test_only_the_owner_can_read_a_new_identity(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "identity.key"

    load_or_create_identity(path)

    assert path.stat().st_mode & 0o777 == 0o600


def test_making_an_identity_leaves_no_other_file(key_file: Path) -> None:
    assert [path.name for path in key_file.parent.iterdir()] == ["identity.key"]


def test_peers_that_start_at_once_get_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    start = threading.Barrier(4)
    peer_ids = []

    def begin() -> None:
        start.wait()
        peer_ids.append(load_or_create_identity(path).peer_id)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert peer_ids == [PeerID.from_identity(path.read_bytes()).to_base58()] * 4


def test_an_identity_is_made_where_hard_links_do_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: Path, _target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)

    load_or_create_identity(tmp_path / "identity.key")

    assert [path.name for path in tmp_path.iterdir()] == ["identity.key"]


def _ed25519() -> bytes:
    return crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519, data=b"1" * 64).SerializeToString()


def _rsa_message_with(data: bytes) -> bytes:
    return crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=data).SerializeToString()


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", os.urandom(1200), _ed25519(), _rsa_message_with(b"no key")],
    ids=["empty", "text", "random", "ed25519", "no key inside"],
)
def test_a_garbage_identity_file_is_refused_with_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        load_or_create_identity(path, option="--network.identity")

    assert "\n" not in str(caught.value)
    assert f"--network.identity: {path} holds no RSA key" in str(caught.value)
    assert path.read_bytes() == content


def test_a_truncated_identity_file_is_refused(tmp_path: Path, key_file: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(key_file.read_bytes()[:-100])

    with pytest.raises(ConfigError, match="holds no RSA key"):
        load_or_create_identity(path)


def test_a_folder_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory; choose a file"):
        load_or_create_identity(tmp_path)


def test_an_identity_below_a_file_is_refused(key_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot use .*; choose a file"):
        load_or_create_identity(key_file / "below" / "identity.key")


def test_an_unreadable_identity_is_refused(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)

    with pytest.raises(ConfigError, match="Permission denied; choose a file"):
        load_or_create_identity(key_file)


def test_the_peer_id_of_a_public_key_is_that_of_its_private_key() -> None:
    private_key = RSAPrivateKey()
    file_content = _rsa_message_with(private_key.to_bytes())

    peer_id = peer_id_of_public_key(private_key.get_public_key().to_bytes())

    assert peer_id == PeerID.from_identity(file_content).to_base58()


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"ssh-rsa AAAA",
        b"ssh-dss AAAAB3NzaC1kc3MAAACBAA==",
        b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIP" + b"".join([b"A" * 41]),
        hashlib.sha256(b"x").digest(),
    ],
)
def test_what_is_no_rsa_public_key_has_no_peer_id(key: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        peer_id_of_public_key(key)


def test_an_identity_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'rb'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(identity.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"

        with pytest.raises(ConfigError, match="in use by another process"):
            hold_identity(identity).__enter__()

        assert other.stdin is not None
        other.stdin.close()
        other.wait(10)
    with hold_identity(identity):
        pass
