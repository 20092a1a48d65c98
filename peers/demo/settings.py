"""What the demo can be told, and what it tells its peers."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from opendiloco.settings import Settings
from peers.config import UserPath

_MIN_OUTER_STEPS = 4  # to kill a peer after the first and have a newcomer take part in another

with warnings.catch_warnings():
    # pydantic's own json() is deprecated, but it still warns of a field of that name.
    warnings.simplefilter("ignore", UserWarning)

    class DemoConfig(Settings):
        """See it work: a bootstrap and some peers train a small model on this machine."""

        peers: int = Field(default=3, ge=1, le=16, description="peers at the start")
        outer_steps: int = Field(default=12, ge=1, le=10**4, description="outer steps to train")
        inner_steps: int = Field(
            default=10, ge=1, le=10**4, description="inner steps between two rounds"
        )
        kill: bool = Field(
            default=True, description="kill a peer midway and have a new one join; needs 2 peers"
        )
        seed: int = Field(default=42, ge=0, lt=2**63, description="gives the first parameters")
        out_dir: UserPath | None = Field(
            default=None, description="folder for all files; none: runs/demo- and the time"
        )
        json: bool = Field(  # type: ignore[assignment]
            default=False,
            description="one JSON object on stdout at the end, all other output on stderr",
        )
        debug: bool = Field(default=False, description="show the traceback of errors")

        @property
        def replaces_a_peer(self) -> bool:
            """Whether a peer is killed and a new one joins."""
            return self.kill and self.peers > 1

        @property
        def kill_after(self) -> int:
            """Outer step after which a peer is killed."""
            return max(1, self.outer_steps // 2 - 1)

        @property
        def longest_s(self) -> float:
            """Seconds after which something must be wrong, even on a slow machine."""
            return 300.0 + self.outer_steps * (60.0 + 5.0 * self.peers * self.inner_steps)

        @model_validator(mode="after")
        def _leaves_time_to_replace_a_peer(self) -> Self:
            if self.replaces_a_peer and self.outer_steps < _MIN_OUTER_STEPS:
                raise ValueError(
                    f"--outer-steps: {self.outer_steps} leave no time to replace a peer; "
                    f"use at least {_MIN_OUTER_STEPS}, or --no-kill"
                )
            return self


def num_threads(num_peers: int) -> int:
    """Return the threads for each peer, so that all together use this machine once."""
    return max(1, (os.cpu_count() or 1) // num_peers)


def bootstrap_arguments(folder: Path) -> list[str]:
    """Return how to start the bootstrap: its module and options."""
    return [
        "bootstrap",
        *("--host", "127.0.0.1", "--port", "0"),
        *("--identity", str(folder / "identity.key"), "--out-dir", str(folder)),
    ]


def peer_arguments(
    config: DemoConfig, folder: Path, *, address: str, cache_dir: Path, min_peers: int
) -> Sequence[str]:
    """Return how to start a peer: its module and options.

    Args:
        config: Of the demo.
        folder: The peer's files; its name is the peer's, too.
        address: Of the bootstrap.
        cache_dir: Where the tokens are.
        min_peers: Peers to wait for before the first inner step.
    """
    options = {
        "name": folder.name,
        "out-dir": folder,
        "initial-peers": address,
        "run-id": "demo",
        "seed": config.seed,
        "device": "cpu",
        "log-every": 1,
        "model.preset": "14m",
        "data.seq-len": 128,
        "data.cache-dir": cache_dir,
        # A few hundred steps of a small model: far higher than what a long run would take.
        "inner.lr": 2e-3,
        "inner.warmup-steps": 10,
        "inner.total-steps": max(1000, 2 * config.outer_steps * config.inner_steps),
        "inner.batch-size": 12,
        "inner.micro-batch-size": 12,
        "diloco.inner-steps": config.inner_steps,
        "diloco.outer-steps": config.outer_steps,
        "averaging.matchmaking-s": 3,
        "averaging.stall-timeout-s": 10,
        "averaging.exchange-timeout-s": 30,
        "network.host": "127.0.0.1",
        "network.min-peers": min_peers,
        "network.join-timeout-s": 180,
    }
    return [
        "peers",
        *(text for name, value in options.items() for text in (f"--{name}", str(value))),
        *(["--debug"] if config.debug else []),
    ]
