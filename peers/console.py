"""Events as lines for people."""

import sys
import time
from collections.abc import Callable

from opendiloco.events import Event


def print_event(event: Event) -> None:
    """Write one line about the event to stdout; events that have none are left out."""
    text = describe(event)
    if text:
        clock = time.strftime("%H:%M:%S", time.localtime(float(event["t"] or 0)))
        sys.stdout.write(f"{clock} {text}\n")
        sys.stdout.flush()


def describe(event: Event) -> str:
    """Return the event in words, or an empty string."""
    line = _LINES.get(str(event["event"]))
    return line(event) if line else ""


def _joined(event: Event) -> str:
    if event["from"] == "seed":
        return "joined at outer step 0, with the parameters of the seed"
    size = _float(event["bytes"]) / 2**20
    return f"joined at outer step {event['outer_step']}: {size:.1f} MiB from the swarm"


def _inner(event: Event) -> str:
    return (
        f"inner step {event['inner_step']}  loss {_decimal(event['loss'])}  "
        f"lr {_float(event['lr']):.2e}  grad norm {_decimal(event['grad_norm'])}  "
        f"{count(event['tokens_per_second'])} tokens/s"
    )


def _round(event: Event) -> str:
    outer_step, outcome = event["outer_step"], event["outcome"]
    if outcome == "failed" and not event["attempts"]:
        return f"round {outer_step} not begun: {event['reason']}"
    if outcome == "failed":
        return f"round {outer_step} failed after {event['attempts']} attempts: {event['reason']}"
    if outcome == "alone":
        return f"round {outer_step}: no other peer is there"
    busy = _float(event["matchmaking_s"]) + _float(event["exchange_s"])
    return (
        f"round {outer_step}: averaged {event['num_peers']} peers in {busy:.2f} s, "
        f"after {_float(event['wait_s']):.2f} s of waiting"
    )


def _outer_step(event: Event) -> str:
    return (
        f"outer step {event['outer_step']} {event['verdict']}  "
        f"loss {_decimal(event['loss'])}  {count(event['num_tokens'])} tokens in the swarm  "
        f"digest {str(event['digest'])[:12]}"
    )


def _healed(event: Event) -> str:
    size = _float(event["bytes"]) / 2**20
    return (
        f"healed at outer step {event['outer_step']}: {event['slices']} slices ({size:.1f} MiB) "
        f"replaced, digest {str(event['digest'])[:12]} instead of "
        f"{str(event['digest_before'])[:12]}"
    )


_LINES: dict[str, Callable[[Event], str]] = {
    "started": lambda event: (
        f"peer {event['peer_id']} at {event['addresses']}, {count(event['num_params'])} parameters"
    ),
    "waiting": lambda event: str(event["text"]),
    "joined": _joined,
    "inner": _inner,
    "round": _round,
    "outer_step": _outer_step,
    "behind": lambda event: (
        f"behind: at outer step {event['outer_step']}, others at {event['swarm_outer_step']}; "
        "catching up"
    ),
    "healed": _healed,
    "lost": lambda event: f"lost: {event['reason']}",
    "repaired": lambda event: (
        f"repaired in {_float(event['seconds']):.1f} s, after this: {event['reason']}"
    ),
    "saved": lambda event: (
        f"saved the model of outer step {event['outer_step']} to {event['path']}"
    ),
    "left": lambda event: f"left at outer step {event['outer_step']} ({event['reason']})",
}


def count(value: object) -> str:
    """Return a count in three digits and a unit: 1.23M."""
    number = _float(value)
    for unit in ("", "k", "M", "B"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def _decimal(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "not finite"


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
