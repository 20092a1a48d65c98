"""How a model's named tensors lie in flat float32 vectors, one vector per fragment."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch

from opendiloco.errors import SchemaMismatchError

TensorSet: TypeAlias = Mapping[str, torch.Tensor]
"""Named tensors of one model."""

_LAYER_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name and shape of one parameter tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The place of every parameter in the fragments' flat vectors.

    Attributes:
        fragments: For each fragment its tensors, in the order in which they lie in its
            vector. One fragment holding everything is plain DiLoCo.
    """

    fragments: tuple[tuple[TensorSpec, ...], ...]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], *, num_fragments: int = 1) -> "Layout":
        """Deal the tensors to fragments, layer by layer in turn.

        Args:
            shapes: Shape of every parameter, in the model's order.
            num_fragments: P. Layer i goes to fragment i mod P; tensors outside the layers
                go to the first fragment, those after the last layer to the last.

        Raises:
            ValueError: If a fragment would stay empty.

        Source:
            Douillard et al. 2025, arXiv:2501.18512, "strided" fragments.
        """
        dealt: list[list[TensorSpec]] = [[] for _ in range(num_fragments)]
        fragment = 0
        seen_layers = False
        for name, shape in shapes.items():
            number = _LAYER_NUMBER.search(name)
            if number is not None:
                seen_layers = True
                fragment = int(number.group(1)) % num_fragments
            elif seen_layers:
                fragment = num_fragments - 1
            dealt[fragment].append(TensorSpec(name, tuple(shape)))
        if not all(dealt):
            raise ValueError(f"{num_fragments} fragments are more than this model has layers for")
        return cls(tuple(tuple(specs) for specs in dealt))

    @property
    def num_fragments(self) -> int:
        """P."""
        return len(self.fragments)

    @cached_property
    def fragment_sizes(self) -> tuple[int, ...]:
        """Number of elements of every fragment."""
        return tuple(sum(spec.num_elements for spec in specs) for specs in self.fragments)

    @property
    def num_params(self) -> int:
        """Number of elements of the whole model."""
        return sum(self.fragment_sizes)

    @cached_property
    def digest(self) -> str:
        """Hash of names, shapes and order: equal for peers that can average, hex."""
        described = [[[spec.name, spec.shape] for spec in specs] for specs in self.fragments]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def views(self, fragment: int, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fragment's tensors as views of its flat vector.

        Args:
            fragment: Which fragment.
            flat: Vector of ``fragment_sizes[fragment]`` elements, any dtype and device.
        """
        if flat.shape != (self.fragment_sizes[fragment],):
            raise SchemaMismatchError(
                f"fragment {fragment} has {self.fragment_sizes[fragment]} elements, "
                f"the vector has shape {tuple(flat.shape)}"
            )
        views = {}
        offset = 0
        for spec in self.fragments[fragment]:
            views[spec.name] = flat[offset : offset + spec.num_elements].view(spec.shape)
            offset += spec.num_elements
        return views

    def pick(self, fragment: int, tensors: TensorSet) -> dict[str, torch.Tensor]:
        """Return the fragment's tensors out of a whole model's, in order.

        Raises:
            SchemaMismatchError: If one is missing or has another shape.
        """
        picked = {}
        for spec in self.fragments[fragment]:
            tensor = tensors.get(spec.name)
            if tensor is None:
                raise SchemaMismatchError(f"tensor {spec.name} is missing")
            if tuple(tensor.shape) != spec.shape:
                raise SchemaMismatchError(
                    f"tensor {spec.name} has shape {tuple(tensor.shape)}, expected {spec.shape}"
                )
            picked[spec.name] = tensor
        return picked

    def flatten(self, fragment: int, tensors: TensorSet) -> torch.Tensor:
        """Copy the fragment's tensors into a new flat float32 vector on the CPU."""
        flat = torch.empty(self.fragment_sizes[fragment], dtype=torch.float32)
        picked = self.pick(fragment, tensors)
        for name, view in self.views(fragment, flat).items():
            view.copy_(picked[name])
        return flat
