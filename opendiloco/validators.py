"""What this peer refuses to keep in the DHT, or to take from it."""

from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

MAX_ENCODED_BYTES = 16384
"""Several times what a peer needs; all values under a key travel in one message of 4 MiB."""


class ReadableValues:
    """A record validator, by hivemind's interface, that lets only readable values of fair size pass.

    hivemind: 1.1.12 never finishes a `get` that meets a value which is not msgpack, so that one
    stranger could blind a swarm by writing nonsense under the key of its progress records.
    """

    priority = 0
    """Less than that of signatures, which therefore are checked and stripped before."""

    def validate(self, record: DHTRecord) -> bool:
        """Return whether the record's value can be read."""
        if len(record.value) > MAX_ENCODED_BYTES:
            return False
        try:
            MSGPackSerializer.loads(record.value)
        except Exception:  # noqa: BLE001 - a stranger's bytes make msgpack's hooks raise anything
            return False
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        """Return the value unchanged."""
        value: bytes = record.value
        return value

    def strip_value(self, record: DHTRecord) -> bytes:
        """Return the value unchanged."""
        value: bytes = record.value
        return value

    def merge_with(self, other: object) -> bool:
        """Return whether `other` adds nothing to this one."""
        return isinstance(other, ReadableValues)
