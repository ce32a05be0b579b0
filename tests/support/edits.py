"""Everything that users do to the weights and modules of a model between two forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .models import WIDTH, Block


def edit_through_data(model: Any) -> None:
    model.blocks[1].up.weight.data.mul_(2)
    model.gain.data.add_(1)


def edit_in_place(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2)
        model.gain.add_(1)


def edit_one_element_through_data(model: Any) -> None:
    model.blocks[-1].down.bias.data[2] = 3.5


def replace_data(model: Any) -> None:
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data * 2


def replace_data_with_other_strides(model: Any) -> None:
    model.blocks[1].up.weight.data = (model.blocks[1].up.weight.data * 2).t().contiguous().t()


def replace_data_with_other_shape(model: Any) -> None:
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data[:8].clone()
    model.blocks[1].up.bias.data = model.blocks[1].up.bias.data[:8].clone()
    model.blocks[1].down.weight.data = model.blocks[1].down.weight.data[:, :8]


def replace_data_with_other_strides_in_the_same_memory(model: Any) -> None:
    weight = model.blocks[1].up.weight
    weight.data = weight.data.as_strided(weight.shape, (1, weight.shape[0]))


def replace_data_with_a_part_of_itself(model: Any) -> None:
    block = model.blocks[1]
    for tensor, part in (
        (block.up.weight, block.up.weight.data[:8]),
        (block.up.bias, block.up.bias.data[:8]),
        (block.down.weight, block.down.weight.data[:, :8]),
    ):
        tensor.data = part


def replace_data_with_expanded(model: Any) -> None:
    model.blocks[1].down.bias.data = torch.tensor([0.5]).expand(WIDTH)


def replace_data_with_other_bits_in_the_same_memory(model: Any) -> None:
    scale = model.blocks[1].scale.requires_grad_(False)
    scale.data = scale.data.view(torch.int32)


def swap_data(model: Any) -> None:
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.data, second.data = second.data, first.data


def swap_data_within_a_block(model: Any) -> None:
    model.blocks[0].scale.data, model.blocks[0].down.bias.data = (
        model.blocks[0].down.bias.data,
        model.blocks[0].scale.data,
    )


def swap_parameters(model: Any) -> None:
    first, second = model.blocks[0].up, model.blocks[1].up
    first.weight, second.weight = second.weight, first.weight


def replace_parameter(model: Any) -> None:
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach() * 2)
    model.gain = nn.Parameter(model.gain.detach() + 1)


def add_parameter(model: Any) -> None:
    model.blocks[1].register_parameter("extra", nn.Parameter(torch.full((WIDTH,), 0.5)))
    model.blocks[1].register_forward_hook(lambda module, args, output: output + module.extra)


def remove_parameter(model: Any) -> None:
    model.blocks[1].up.bias = None


def delete_and_add_again(model: Any) -> None:
    weight = model.blocks[1].up.weight
    del model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(weight.detach().clone() * 3)


def swap_module(model: Any) -> None:
    torch.manual_seed(5)
    model.blocks[1] = Block()
    model.proj_in = nn.Linear(WIDTH, WIDTH, bias=False)


def swap_blocks(model: Any) -> None:
    model.blocks[0], model.blocks[2] = model.blocks[2], model.blocks[0]


def append_block(model: Any) -> None:
    torch.manual_seed(5)
    model.blocks.append(Block())


def remove_block(model: Any) -> None:
    del model.blocks[1]


def tie(model: Any) -> None:
    model.blocks[2].up.weight = model.blocks[0].up.weight


def tie_data(model: Any) -> None:
    model.blocks[2].up.weight.data = model.blocks[0].up.weight.data


def bfloat16(model: Any) -> None:
    model.to(torch.bfloat16)


def load_state_dict(model: Any) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def share_memory(model: Any) -> None:
    """So that they can be sent to other processes: offloaded weights move."""
    model.share_memory()


def edit_all(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.125)


def recast(model: Any) -> None:
    model.double().float()


def add_buffer(model: Any) -> None:
    model.blocks[1].register_buffer("shift", torch.full((WIDTH,), 0.25))
    model.blocks[1].register_forward_hook(lambda module, args, output: output - module.shift)


def move_block(model: Any) -> None:
    model.blocks.append(model.blocks.pop(0))


def lora(model: Any) -> None:
    """A wrapper around a layer, as peft makes them."""

    class Lora(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.a = nn.Linear(WIDTH, 2, bias=False)
            self.b = nn.Linear(2, 2 * WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + self.b(self.a(x))

    torch.manual_seed(4)
    model.blocks[1].up = Lora(model.blocks[1].up)


EDITS = [
    value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__ and callable(value)
]
any_edit = pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)


def new_table(model: Any) -> None:
    """Not among `EDITS`: the first forward after it may fail, as `test_another_table` shows."""
    block = model.blocks[1]
    block._parameters = {**block._parameters, "scale": nn.Parameter(torch.full((WIDTH,), 0.75))}


def merge_lora(model: Any) -> None:
    """Not among `EDITS`: only after `lora`. The layer, edited, goes back to where it was."""
    wrapper = model.blocks[1].up
    wrapper.base_layer.weight.data += wrapper.b.weight @ wrapper.a.weight
    model.blocks[1].up = wrapper.base_layer
