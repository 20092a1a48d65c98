"""The one subclass of hivemind's averager: rounds addressed by outer step and group size."""

import contextlib
import multiprocessing as mp
import time
from collections.abc import Sequence
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PDaemonError
from hivemind.utils import MPFuture
from typing_extensions import override

from opendiloco.units import OuterStep, Seconds


class RoundAverager(DecentralizedAverager):
    """Averages tensors with exactly the peers that are at the same outer step.

    hivemind fixes the group key and the group size when the averager starts; here both are
    set before every round. A round in which a reducer's part is missing fails, where
    hivemind would keep this peer's own values and report success.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dht: DHT, **options: Any) -> None:  # noqa: ANN401 - hivemind's own options
        self._exchange_seconds = mp.Value("d", 0.0)
        super().__init__(tensors, dht, start=False, allow_state_sharing=False, **options)

    @property
    def exchange(self) -> Seconds:
        """How long the last exchange took."""
        return Seconds(self._exchange_seconds.value)

    def address_round(self, outer_step: OuterStep, *, group_size: int, timeout: Seconds) -> None:
        """Say whom to meet next: peers at this outer step, this many with this one.

        Raises:
            TimeoutError: If the averager's process does not answer.
        """
        done = MPFuture()
        arguments = {"group_bits": f"{outer_step:b}", "group_size": group_size, "done": done}
        self._outer_pipe.send(("_address_round", [], arguments))
        done.result(timeout=timeout)

    async def _address_round(self, *, group_bits: str, group_size: int, done: MPFuture) -> None:
        """Run in the averager's process."""
        matchmaking = self._matchmaking
        matchmaking.group_key_manager.group_bits = group_bits
        # hivemind: a target smaller than the group that a leader made raises while the next
        # key is drawn; None draws from the group's size instead (1.1.12).
        matchmaking.group_key_manager.target_group_size = None
        matchmaking.target_group_size = group_size
        matchmaking.potential_leaders.target_group_size = group_size
        done.set_result(None)

    @override
    async def _shutdown(self, timeout: float | None) -> None:
        # hivemind: raises in its own thread when p2pd is gone already (1.1.12).
        with contextlib.suppress(OSError, P2PDaemonError):
            await super()._shutdown(timeout)

    @override
    async def _run_allreduce_inplace_(
        self,
        tensors: Sequence[torch.Tensor],
        group_info: GroupInfo,
        group_id: bytes | None = None,
        **options: Any,
    ) -> None:
        began_at = time.monotonic()
        await super()._run_allreduce_inplace_(tensors, group_info, group_id, **options)
        self._exchange_seconds.value = time.monotonic() - began_at
        runner = self._running_groups[group_id or group_info.group_id].result()
        container = runner.tensor_part_container
        # hivemind: a dead reducer's part silently keeps the local values (1.1.12).
        if container.failed_size:
            raise AllreduceException(
                f"{container.failed_size} of {container.total_size} elements were not averaged"
            )
