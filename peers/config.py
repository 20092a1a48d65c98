"""What a peer can be told: every setting with its default, bounds and meaning."""

import contextlib
import ipaddress
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from opendiloco.addresses import complete_announced, parse_multiaddr
from opendiloco.errors import ConfigError
from opendiloco.settings import Settings, UserPath

__all__ = [
    "AveragingConfig",
    "DataConfig",
    "DiLoCoConfig",
    "InnerConfig",
    "ModelConfig",
    "NetworkConfig",
    "PeerConfig",
    "UserPath",
]

_MAX_NAME = 40  # characters; a progress record has room for no more
_DAY_S = 86400.0


def _plain_only(supported: int) -> Callable[[int], int]:
    def check(value: int) -> int:
        if value != supported:
            raise ValueError(f"{value} is not yet supported; use {supported}")
        return value

    return check


@contextlib.contextmanager
def _unnamed(option: str) -> Iterator[None]:
    """Turn a ConfigError into a ValueError without the name, which load_settings knows better."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error).removeprefix(f"{option}: ")) from None


Timeout = Annotated[float, Field(gt=0, le=_DAY_S)]


class ModelConfig(Settings):
    """Model."""

    preset: str = Field(
        default="14m", min_length=1, description="a Llama: 2m, 14m, 60m, 150m or 1b"
    )
    config: UserPath | None = Field(
        default=None, description="a Hugging Face config.json of any causal LM, instead of preset"
    )


class DataConfig(Settings):
    """Data."""

    sources: list[str] = Field(
        default=["stdlib"],
        description="text files and folders; stdlib is the source code of Python's library",
    )
    tokenizer: str = Field(
        default="bytes",
        min_length=1,
        description="bytes, or a Hugging Face tokenizer: its folder, file or name",
    )
    seq_len: int = Field(default=256, ge=2, le=2**20, description="tokens per sequence")
    cache_dir: UserPath = Field(
        default=Path("~/.cache/opendiloco"),
        validate_default=True,
        description="where tokenised text is kept",
    )

    @field_validator("sources")
    @classmethod
    def _needs_a_source(cls, sources: list[str]) -> list[str]:
        if not sources:
            raise ValueError("the list is empty; give text files or folders, or stdlib")
        return sources


class InnerConfig(Settings):
    """Inner steps: AdamW on this peer's own data."""

    lr: float = Field(default=4e-4, gt=0, le=10, description="learning rate at its peak")
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="weight decay of AdamW")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's momentum")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="decay of AdamW's squared gradients")
    max_grad_norm: float = Field(
        default=1.0, gt=0, le=1e9, description="longer gradients are scaled down to this L2 norm"
    )
    warmup_steps: int = Field(
        default=1000, ge=0, le=10**9, description="inner steps until the peak, linear"
    )
    total_steps: int = Field(
        default=88000,
        ge=1,
        le=10**9,
        validate_default=True,
        description="inner steps of the swarm until the cosine has come down",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="where the cosine ends, as a share of the peak"
    )
    batch_size: int = Field(default=32, ge=1, le=2**20, description="sequences per inner step")
    micro_batch_size: int = Field(
        default=8,
        ge=1,
        le=2**20,
        validate_default=True,
        description="sequences at once on the device; divides batch_size",
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="number format of the computation; auto: bfloat16 on GPUs that have it",
    )

    @field_validator("total_steps")
    @classmethod
    def _is_longer_than_the_warmup(cls, total_steps: int, info: ValidationInfo) -> int:
        warmup_steps = info.data.get("warmup_steps", 0)
        if total_steps <= warmup_steps:
            raise ValueError(
                f"{total_steps} steps end before the warm-up does; "
                f"raise it or lower --inner.warmup-steps, {warmup_steps}"
            )
        return total_steps

    @field_validator("micro_batch_size")
    @classmethod
    def _divides_the_batch(cls, micro_batch_size: int, info: ValidationInfo) -> int:
        batch_size = info.data.get("batch_size", micro_batch_size)
        if batch_size % micro_batch_size:
            raise ValueError(
                f"{micro_batch_size} does not divide --inner.batch-size, {batch_size}; "
                "choose two that fit"
            )
        return micro_batch_size


class DiLoCoConfig(Settings):
    """Outer steps: what all peers do together."""

    inner_steps: int = Field(
        default=100, ge=1, le=10**6, description="H: inner steps between two rounds"
    )
    outer_lr: float = Field(default=0.7, gt=0, le=10, description="outer learning rate")
    outer_momentum: float = Field(default=0.9, ge=0, lt=1, description="Nesterov momentum")
    outer_steps: int | None = Field(
        default=None, ge=1, le=10**9, description="stop at this outer step; none: until told"
    )
    weighting: Literal["tokens", "equal"] = Field(
        default="tokens", description="a peer's weight in the average"
    )
    on_missed_round: Literal["rebase", "discard"] = Field(
        default="rebase", description="what becomes of local progress when a round was missed"
    )
    num_fragments: Annotated[int, AfterValidator(_plain_only(1))] = Field(
        default=1, description="parts of the model that are averaged in turn; 1 for now"
    )
    overlap_steps: Annotated[int, AfterValidator(_plain_only(0))] = Field(
        default=0, description="inner steps that go on during a round; 0 for now"
    )


class AveragingConfig(Settings):
    """Averaging: how rounds are held."""

    codec: Literal["fp16", "int8", "none"] = Field(
        default="fp16", description="number format on the wire"
    )
    matchmaking_s: Timeout = Field(
        default=5.0, description="seconds of patience for late peers once the search has begun"
    )
    wait_s: float = Field(
        default=60.0, ge=0, le=_DAY_S, description="seconds to wait for peers that still train"
    )
    stall_timeout_s: Timeout = Field(
        default=15.0, description="seconds of silence after which a peer is dropped from a round"
    )
    exchange_timeout_s: Timeout = Field(
        default=120.0, description="seconds that one exchange may take at most"
    )
    attempts: int = Field(default=3, ge=1, le=100, description="exchanges to try in a round")


class NetworkConfig(Settings):
    """Network: how this peer is reached, and whom it believes alive."""

    host: str = Field(
        default="0.0.0.0",  # noqa: S104 - peers come from everywhere
        description="IP address to listen on",
    )
    port: int = Field(default=0, ge=0, le=65535, description="TCP port; 0: any free one")
    announce: list[str] = Field(
        default=[], description="IP addresses, host names or multiaddrs that others should dial"
    )
    identity: UserPath | None = Field(
        default=None, description="key file; none: identity.key in out_dir"
    )
    relay: bool = Field(default=False, description="pass on the traffic of other peers")
    client_mode: bool = Field(default=False, description="dial others, but never be dialled")
    join_timeout_s: Timeout = Field(
        default=600.0, description="seconds after which joining is given up"
    )
    heartbeat_s: float = Field(
        default=2.0, ge=0.1, le=3600, description="seconds between two progress records"
    )
    peer_timeout_s: Timeout = Field(
        default=8.0,
        validate_default=True,
        description="seconds without a record after which a peer counts as gone",
    )
    min_peers: int = Field(
        default=1, ge=1, le=10**4, description="peers to wait for before the first inner step"
    )

    @field_validator("host")
    @classmethod
    def _is_an_ip_address(cls, host: str) -> str:
        try:
            return str(ipaddress.ip_address(host.strip()))
        except ValueError:
            raise ValueError(
                f"{host!r} is no IP address; use 0.0.0.0 to listen everywhere, "
                "and --network.announce for the name that others dial"
            ) from None

    @field_validator("announce")
    @classmethod
    def _can_be_dialled(cls, announce: list[str], info: ValidationInfo) -> list[str]:
        with _unnamed("--network.announce"):
            for entry in announce:
                complete_announced(entry, port=info.data.get("port", 0), prefix="--network.")
        return announce

    @field_validator("peer_timeout_s")
    @classmethod
    def _outlasts_two_heartbeats(cls, peer_timeout_s: float, info: ValidationInfo) -> float:
        heartbeat_s = info.data.get("heartbeat_s", 0.0)
        if peer_timeout_s <= 2 * heartbeat_s:
            raise ValueError(
                f"{peer_timeout_s} is too short; "
                f"it must be more than twice --network.heartbeat-s, {heartbeat_s}"
            )
        return peer_timeout_s


class PeerConfig(Settings):
    """Join a swarm and train a language model with it."""

    run_id: str = Field(default="opendiloco", description="name of the run, equal on all peers")
    new_swarm: bool = Field(default=False, description="found a swarm instead of joining one")
    initial_peers: list[str] = Field(
        default=[], description="multiaddrs of peers, or of a bootstrap, to join by"
    )
    out_dir: UserPath = Field(
        default=Path("runs/peer"), description="folder for events, identity and the model"
    )
    name: str | None = Field(default=None, description="what others call this peer")
    seed: int = Field(
        default=42, ge=0, lt=2**63, description="gives the first parameters; equal on all peers"
    )
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N or mps")
    log_every: int = Field(
        default=10, ge=1, le=10**6, description="inner steps between two log lines"
    )
    debug: bool = Field(default=False, description="show the traceback of errors")
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    inner: InnerConfig = Field(default_factory=InnerConfig)
    diloco: DiLoCoConfig = Field(default_factory=DiLoCoConfig)
    averaging: AveragingConfig = Field(default_factory=AveragingConfig)
    network: NetworkConfig = Field(default_factory=NetworkConfig)

    @property
    def identity_path(self) -> Path:
        """The file with this peer's key."""
        return self.network.identity or self.out_dir / "identity.key"

    @property
    def round_timeout_s(self) -> float:
        """Seconds that a whole round may take: waiting, and every attempt."""
        averaging = self.averaging
        attempt_s = 2 * averaging.matchmaking_s + averaging.exchange_timeout_s
        return averaging.wait_s + averaging.attempts * attempt_s

    @field_validator("run_id")
    @classmethod
    def _is_a_plain_word(cls, run_id: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run_id):
            raise ValueError(f"{run_id!r} must be 1 to 64 letters, digits, - and _")
        return run_id

    @field_validator("initial_peers")
    @classmethod
    def _are_addresses(cls, initial_peers: list[str]) -> list[str]:
        if not initial_peers:  # given, but empty: an unset variable of the shell
            raise ValueError(
                "the list is empty; give the address of a peer or bootstrap, "
                "or found a swarm with --new-swarm and without this"
            )
        with _unnamed("--initial-peers"):
            return [parse_multiaddr(text) for text in initial_peers]

    @field_validator("name")
    @classmethod
    def _can_be_shown(cls, name: str | None) -> str | None:
        if name is not None and not (0 < len(name) <= _MAX_NAME and name.isprintable()):
            raise ValueError(f"{name!r} must be 1 to {_MAX_NAME} printable characters")
        return name

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", device):
            raise ValueError(f"{device!r} must be auto, cpu, cuda, cuda:N or mps")
        return device

    @model_validator(mode="after")
    def _has_one_way_in(self) -> Self:
        if self.initial_peers and self.new_swarm:
            raise ValueError(
                "--initial-peers and --new-swarm exclude each other; drop --new-swarm to join"
            )
        if not self.initial_peers and not self.new_swarm:
            raise ValueError(
                "--initial-peers is missing; give the address of a peer or bootstrap, "
                "or found a swarm with --new-swarm"
            )
        return self
