"""What somebody does who speaks hivemind's protocol but does not play by our rules."""

import functools
import time

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID

from opendiloco.dht import SwarmDHT


def store_garbage(stranger: SwarmDHT, *, key: str) -> list[bool]:
    """Ask every other node to keep bytes that are not msgpack; return what each said."""
    job = functools.partial(_store_garbage, key=key)
    answers = stranger.dht.run_coroutine(job, return_future=True).result(20)
    return list(answers)


async def _store_garbage(_dht: hivemind.DHT, node: DHTNode, *, key: str) -> list[bool]:
    answers: list[bool] = []
    for peer_id in list(node.protocol.routing_table.uid_to_peer_id.values()):
        stored = await node.protocol.call_store(
            peer_id, [DHTID.generate(key)], [b"\xc1"], time.time() + 60.0, subkeys=["stranger"]
        )
        answers.extend(stored or [])
    return answers
