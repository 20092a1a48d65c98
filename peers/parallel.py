"""Where a peer's model lives: the device, and the way between it and the swarm's CPU tensors."""

import torch
from torch import nn

from opendiloco.errors import ConfigError
from opendiloco.tensors import TensorSet


def choose_device(name: str) -> torch.device:
    """Return the device to train on, without touching it: hivemind must fork before CUDA starts.

    Args:
        name: ``auto`` for the best one there is, or cpu, cuda, cuda:N, mps.

    Raises:
        ConfigError: If this machine does not have it.
    """
    num_gpus = torch.cuda.device_count()
    has_mps = torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if num_gpus else "mps" if has_mps else "cpu")
    kind, _, index = name.partition(":")
    if (kind == "cuda" and int(index or 0) >= num_gpus) or (kind == "mps" and not has_mps):
        raise ConfigError(
            f"--device {name}: not on this machine, which has {num_gpus} CUDA devices; "
            "use --device auto or cpu"
        )
    return torch.device(name)


class Replica:
    """This peer's copy of the model, float32, on one device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model.to(device)
        self.device = device
        self._parameters = dict(model.named_parameters())

    def export(self) -> TensorSet:
        """Return the parameters as named float32 CPU tensors.

        On the CPU these are the parameters themselves, not copies: they change with the
        next inner step.
        """
        return {
            name: parameter.detach().to("cpu", torch.float32)
            for name, parameter in self._parameters.items()
        }

    def load(self, parameters: TensorSet) -> None:
        """Overwrite the parameters that are named, from tensors of any dtype and device."""
        with torch.no_grad():
            for name, tensor in parameters.items():
                self._parameters[name].copy_(tensor)
