"""One peer's outer loop, with a small model and rounds that the test ends by hand."""

import numpy as np
import torch

from opendiloco.diloco import DiLoCo, OuterReport, Verdict, Weighting
from opendiloco.outer import NesterovConfig
from opendiloco.schedule import OuterSchedule
from opendiloco.state import OuterState
from opendiloco.tensors import Layout
from opendiloco.units import Seconds
from tests.support.averagers import ManualAverager

SHAPES = {"embed.w": (6, 4), "layers.0.w": (4, 4), "layers.1.w": (4, 4), "head.w": (4, 6)}
Model = dict[str, torch.Tensor]


def model(seed: int = 0, *, scale: float = 1.0) -> Model:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(s, generator=generator) for name, s in SHAPES.items()}


def trained(parameters: Model, seed: int) -> Model:
    """What some inner steps make of the parameters."""
    return {name: parameters[name] + delta for name, delta in model(seed, scale=0.01).items()}


def flat(tensors: Model) -> np.ndarray:
    return np.concatenate([tensors[name].detach().numpy().ravel() for name in SHAPES])


class Peer:
    """A peer at outer step 0 whose rounds the test ends by hand."""

    def __init__(
        self, *, num_fragments: int = 1, overlap: int = 0, weighting: Weighting = Weighting.TOKENS
    ) -> None:
        self.layout = Layout.of(SHAPES, num_fragments=num_fragments)
        self.averager = ManualAverager()
        schedule = OuterSchedule(10 * num_fragments, num_fragments, overlap)
        self.diloco = DiLoCo(
            OuterState.initial(self.layout, model()),
            self.layout,
            averager=self.averager,
            schedule=schedule,
            outer=NesterovConfig(),
            weighting=weighting,
            round_timeout=Seconds(0.01),
        )

    def begin(self, local: Model, *, num_tokens: int = 100) -> Verdict | None:
        self.diloco.count(num_steps=10, num_tokens=num_tokens)
        return self.diloco.begin_round(local)

    def contribution(self) -> np.ndarray:
        fragment = self.averager.requests[-1].fragment
        return self.averager.contribution(self.layout.fragment_sizes[fragment]).numpy()

    def average(self, local: Model, *, num_tokens: int = 100) -> OuterReport:
        """End the round with the own contribution as the average."""
        self.averager.average(torch.from_numpy(self.contribution()), num_tokens=num_tokens)
        return self.diloco.finish_round(local)

    def fail(self, local: Model) -> OuterReport:
        self.averager.fail()
        return self.diloco.finish_round(local)
