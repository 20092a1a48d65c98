"""Layouts: every parameter has exactly one place, and finds its way back."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opendiloco.errors import SchemaMismatchError
from opendiloco.tensors import Layout

Shapes = dict[str, tuple[int, ...]]

SHAPES: Shapes = {
    "embed.weight": (5, 4),
    "layers.0.a": (4, 4),
    "layers.0.b": (4,),
    "layers.1.a": (4, 4),
    "layers.2.a": (4, 4),
    "norm.weight": (4,),
    "head.weight": (5, 4),
}


@st.composite
def models(draw: st.DrawFn) -> tuple[Shapes, int]:
    """A model with some tensors before, in and after its layers, and a P that fits."""
    shape = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    num_layers = draw(st.integers(1, 6))
    shapes: Shapes = {f"embed{i}.w": draw(shape) for i in range(draw(st.integers(0, 2)))}
    for layer in range(num_layers):
        for name in range(draw(st.integers(1, 3))):
            shapes[f"model.layers.{layer}.part{name}.w"] = draw(shape)
    shapes |= {f"head{i}.w": draw(shape) for i in range(draw(st.integers(0, 2)))}
    return shapes, draw(st.integers(1, num_layers))


def filled(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors in which no two elements of the model are equal."""
    tensors = {}
    offset = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        tensors[name] = torch.arange(offset, offset + size, dtype=torch.float32).view(shape)
        offset += size
    return tensors


@given(models())
def test_flattened_tensors_come_back_as_they_were(model: tuple[Shapes, int]) -> None:
    shapes, num_fragments = model
    layout = Layout.of(shapes, num_fragments=num_fragments)
    tensors = filled(shapes)

    back: dict[str, torch.Tensor] = {}
    for fragment in range(num_fragments):
        back |= layout.views(fragment, layout.flatten(fragment, tensors))

    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@given(models())
def test_fragments_cover_every_parameter_exactly_once(model: tuple[Shapes, int]) -> None:
    shapes, num_fragments = model
    layout = Layout.of(shapes, num_fragments=num_fragments)

    flat = torch.cat([layout.flatten(f, filled(shapes)) for f in range(num_fragments)])

    num_params = sum(math.prod(shape) for shape in shapes.values())
    assert sorted(flat.tolist()) == list(range(num_params))
    assert layout.num_params == num_params
    assert layout.num_fragments == num_fragments


@given(models())
def test_layer_i_is_in_fragment_i_mod_p(model: tuple[Shapes, int]) -> None:
    shapes, num_fragments = model
    layout = Layout.of(shapes, num_fragments=num_fragments)

    for fragment, specs in enumerate(layout.fragments):
        layers = {int(s.name.split(".")[2]) for s in specs if s.name.startswith("model.layers")}
        assert {layer % num_fragments for layer in layers} <= {fragment}


def test_what_is_before_the_layers_goes_first_and_what_is_after_goes_last() -> None:
    layout = Layout.of(SHAPES, num_fragments=2)

    names = [[spec.name for spec in specs] for specs in layout.fragments]

    assert names == [
        ["embed.weight", "layers.0.a", "layers.0.b", "layers.2.a"],
        ["layers.1.a", "norm.weight", "head.weight"],
    ]


def test_one_fragment_keeps_the_models_order() -> None:
    layout = Layout.of(SHAPES)

    assert [spec.name for spec in layout.fragments[0]] == list(SHAPES)
    assert layout.fragment_sizes == (20 + 16 + 4 + 16 + 16 + 4 + 20,)


@pytest.mark.parametrize("shapes", [SHAPES, {"embed.weight": (5, 4), "head.weight": (5, 4)}])
def test_a_fragment_with_nothing_in_it_is_refused(shapes: Shapes) -> None:
    with pytest.raises(ValueError, match="5 fragments are more than this model has layers for"):
        Layout.of(shapes, num_fragments=5)


@pytest.mark.parametrize(
    "other",
    [
        SHAPES | {"norm.weight": (5,)},
        SHAPES | {"more.weight": (1,)},
        {name: shape for name, shape in SHAPES.items() if name != "norm.weight"},
        {name.replace("head", "lm_head"): shape for name, shape in SHAPES.items()},
        dict(reversed(SHAPES.items())),
    ],
    ids=["shape", "more", "fewer", "name", "order"],
)
def test_another_model_has_another_digest(other: Shapes) -> None:
    assert Layout.of(other).digest != Layout.of(SHAPES).digest


def test_the_digest_depends_on_the_number_of_fragments() -> None:
    digests = {Layout.of(SHAPES, num_fragments=count).digest for count in (1, 2, 3)}

    assert len(digests) == 3


def test_the_digest_is_the_same_for_lists_and_tuples_as_shapes() -> None:
    as_lists = {name: list(shape) for name, shape in SHAPES.items()}

    assert Layout.of(as_lists).digest == Layout.of(SHAPES).digest


def test_views_share_memory_with_the_vector() -> None:
    layout = Layout.of(SHAPES)
    flat = torch.zeros(layout.num_params)

    layout.views(0, flat)["layers.1.a"].fill_(1.0)

    assert flat.sum().item() == 16


def test_flattening_gives_a_new_float32_vector() -> None:
    layout = Layout.of(SHAPES)
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}

    flat = layout.flatten(0, tensors)
    flat.zero_()

    assert flat.dtype is torch.float32
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())


def test_a_vector_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(SchemaMismatchError, match="fragment 0 has 96 elements"):
        Layout.of(SHAPES).views(0, torch.zeros(95))


def test_a_missing_tensor_is_refused_by_name() -> None:
    tensors = filled(SHAPES)
    del tensors["norm.weight"]

    with pytest.raises(SchemaMismatchError, match=r"tensor norm\.weight is missing"):
        Layout.of(SHAPES).flatten(0, tensors)


def test_a_tensor_of_another_shape_is_refused_by_name() -> None:
    tensors = filled(SHAPES) | {"norm.weight": torch.zeros(2, 2)}

    with pytest.raises(SchemaMismatchError, match=r"norm\.weight has shape \(2, 2\), expected"):
        Layout.of(SHAPES).flatten(0, tensors)
