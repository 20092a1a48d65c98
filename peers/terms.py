"""The settings that all peers of a run must share."""

import hashlib
import json

from opendiloco.progress.records import PROTOCOL_VERSION
from opendiloco.tensors import Layout
from peers.config import PeerConfig

_FINGERPRINT_DIGITS = 16


def shared_terms(
    config: PeerConfig, layout: Layout, *, model: str, tokenizer: str
) -> dict[str, str]:
    """Return the settings that all peers of a run must share, by the name of their option.

    Args:
        config: The peer's settings.
        layout: Where the model's parameters lie.
        model: Digest of the model's configuration.
        tokenizer: Digest of the tokenizer.
    """
    diloco, inner = config.diloco, config.inner
    return {
        "protocol": str(PROTOCOL_VERSION),
        "model": layout.digest[:16],
        "model.config": model[:16],
        "data.tokenizer": tokenizer[:16],
        "data.seq-len": str(config.data.seq_len),
        "inner.lr": repr(inner.lr),
        "inner.min-lr-ratio": repr(inner.min_lr_ratio),
        "inner.warmup-steps": str(inner.warmup_steps),
        "inner.total-steps": str(inner.total_steps),
        "diloco.inner-steps": str(diloco.inner_steps),
        "diloco.outer-lr": repr(diloco.outer_lr),
        "diloco.outer-momentum": repr(diloco.outer_momentum),
        "diloco.num-fragments": str(diloco.num_fragments),
        "diloco.weighting": diloco.weighting,
        "averaging.codec": config.averaging.codec,
        "seed": str(config.seed),
    }


def fingerprint_of(terms: dict[str, str]) -> str:
    """Return the digest by which peers tell whether they train the same thing."""
    encoded = json.dumps(terms, sort_keys=True).encode()
    return hashlib.sha256(encoded).hexdigest()[:_FINGERPRINT_DIGITS]
