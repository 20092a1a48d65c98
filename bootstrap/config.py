"""What the bootstrap node can be told."""

from pathlib import Path

from pydantic import Field

from opendiloco.settings import Settings, UserPath


class BootstrapConfig(Settings):
    """Run a way into the swarm: a node that never trains."""

    host: str = Field(
        default="0.0.0.0",  # noqa: S104 - it is there to be reached
        description="IP address to listen on",
    )
    port: int = Field(
        default=31337, ge=0, le=65535, description="TCP port to listen on; 0 for any free one"
    )
    announce: list[str] = Field(
        default=[],
        description="IP addresses, host names or multiaddresses under which others reach this "
        "node; needed behind a router or in a container",
    )
    identity: UserPath = Field(
        default=Path("~/.opendiloco/bootstrap.key"),
        validate_default=True,
        description="file with the key that the peer id follows from; made when missing",
    )
    initial_peers: list[str] = Field(
        default=[], description="multiaddresses of peers of the swarm to join, if there is one"
    )
    relay: bool = Field(default=True, description="relay for peers that cannot be dialled")
    upnp: bool = Field(default=False, description="ask the router to forward the port")
    join_timeout_s: float = Field(
        default=600.0, gt=0, description="how long to try to reach one of initial_peers"
    )
    out_dir: UserPath | None = Field(default=None, description="folder for events.jsonl")
    debug: bool = Field(default=False, description="show tracebacks and libp2p's log")
