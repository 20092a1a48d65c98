"""Peers' network sides on loopback."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from opendiloco.dht import NetworkOptions, SwarmDHT
from opendiloco.identity import load_or_create_identity
from opendiloco.units import Seconds
from tests.support.network import StartDHT


@pytest.fixture
def start_dht(tmp_path: Path) -> Iterator[StartDHT]:
    """Start peers by name, with the addresses to join and network options; ends them all."""
    with ExitStack() as stack:

        def begin(
            name: str,
            *initial_peers: str,
            on_retry: Callable[[str], None] = lambda _: None,
            binary: Path | None = None,
            **options: object,
        ) -> SwarmDHT:
            identity = load_or_create_identity(tmp_path / f"{name}.key")
            chosen = {"host": "127.0.0.1", "join_timeout": Seconds(30.0), **options}
            network = NetworkOptions(initial_peers=initial_peers, **chosen)  # type: ignore[arg-type]
            dht = SwarmDHT.start(network, identity, on_retry=on_retry, binary=binary)
            return stack.enter_context(dht)

        yield begin


@pytest.fixture
def temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets go in this test, and nothing else; short, as their paths must be."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)
