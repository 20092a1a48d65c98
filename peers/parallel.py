"""Where a peer's model lives: the device, and the way between it and the swarm's CPU tensors."""

import torch
from torch import nn

from opendiloco.errors import ConfigError
from opendiloco.tensors import TensorSet


def choose_device(name: str) -> torch.device:
    """Return the device to train on.

    Args:
        name: ``auto`` for the best one there is, or what ``torch.device`` takes.

    Raises:
        ConfigError: If this machine does not have it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name}: {reason}; use --device auto or cpu") from None
    return device


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
