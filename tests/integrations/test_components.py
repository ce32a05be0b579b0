"""Components of pipelines over time: what each call does with one that is offloaded already, was added, or is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from group_offload import (
    ConfigError,
    StateError,
    apply_group_offloading,
    disable_group_offload,
    enable_group_offload,
    from_pretrained,
    handle_of,
    handles_of,
    remove_group_offloading,
)

from ..support import tiny_models as tiny
from ..support.pipelines import models_of, modular_pipeline, run_modular
from ..support.simulated import SimulatedDevice, use_simulated_device

LEAVES = {"offload_type": "leaf_level"}
BLOCKS = {"offload_type": "block_level"}


class Kind:
    """A pipeline, another one with the same components, and an image."""

    def __init__(self, name: str) -> None:
        self.is_modular = name == "modular"
        self.make: Callable[[], Any] = modular_pipeline if self.is_modular else tiny.flux_pipeline
        self.run: Callable[[Any], torch.Tensor] = run_modular if self.is_modular else tiny.run

    def other(self, pipe: Any) -> Any:
        if self.is_modular:
            return modular_pipeline(**pipe.components)
        other = diffusers.FluxPipeline.from_pipe(pipe)
        other.set_progress_bar_config(disable=True)
        return other

    def expected(self, device: torch.device) -> torch.Tensor:
        pipe = self.make()
        pipe.to(device)
        return self.run(pipe)


@pytest.fixture(params=["classic", "modular"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


by_whom = pytest.mark.parametrize("by", ["this pipeline", "another pipeline"])


# ---------------------------------------------------------------- offloaded already


@pytest.mark.parametrize("given", [{}, LEAVES, {"exclude_modules": ["tokenizer"], **LEAVES}], ids=str)
@by_whom
def test_no_option_or_the_same_ones_share(given: dict[str, Any], by: str, kind: Kind, device: torch.device) -> None:
    """Hazard: a second `enable_group_offload` is ignored silently, and pins everything again."""
    pipe = kind.make()
    handles = enable_group_offload(pipe, onload_device=device, **LEAVES)
    again = pipe if by == "this pipeline" else kind.other(pipe)
    assert handles and enable_group_offload(again, onload_device=device, **given) == handles
    for each in (again, pipe):
        assert torch.equal(kind.run(each), kind.expected(device))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (BLOCKS, r"offloaded.*with offload_type='leaf_level'\..* leave offload_type out"),
        ({"model_options": {"vae": BLOCKS}}, r"^vae .*with offload_type='leaf_level'"),
        ({"offload_device": "disk", "low_cpu_mem_usage": True}, r"low_cpu_mem_usage=False, offload_device='cpu'"),
        ({"exclude_modules": "vae"}, r"^vae .* leave it out of exclude_modules"),
    ],
    ids=str,
)
@by_whom
def test_other_options_raise_and_change_nothing(
    given: dict[str, Any], named: str, by: str, kind: Kind, device: torch.device
) -> None:
    """Hazard: other options for a component that's offloaded already are ignored silently."""
    pipe = kind.make()
    handles = enable_group_offload(pipe, onload_device=device, **LEAVES)
    again, undo = pipe, r".*disable_group_offload\(pipe\) first"
    if by == "another pipeline":
        again, undo = kind.other(pipe), rf".*disable_group_offload\(\) on the other {type(pipe).__name__} first"
    with pytest.raises(StateError, match=named) as error:
        enable_group_offload(again, **given)
    error.match(undo)
    assert handles_of(pipe) == handles
    if "model_options" in given:  # what the message says helps
        disable_group_offload(pipe)
        enable_group_offload(again, onload_device=device, **given)
        assert handles_of(again)["vae"].config.offload_type == "block_level"


@pytest.mark.parametrize("last", ["the first", "the second"])
def test_a_shared_model_stays_until_its_last_pipeline_is_disabled(
    last: str, kind: Kind, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Hazard: disabling one pipeline takes a shared component away from another."""
    first = kind.make()
    handles = enable_group_offload(first, onload_device=device)
    second = kind.other(first)
    enable_group_offload(second)
    gone, kept = (second, first) if last == "the first" else (first, second)
    disable_group_offload(gone)
    assert (
        f"vae (AutoencoderKL) stays offloaded. To restore it, call disable_group_offload() on the other {type(kept).__name__}"
        in caplog.text
    )
    assert handles_of(kept) == handles
    assert torch.equal(kind.run(kept), kind.expected(device))
    disable_group_offload(kept)
    assert not handles_of(kept) and not any(handle.is_active for handle in handles.values())


def test_a_pipeline_that_is_gone_keeps_nothing_offloaded(kind: Kind, device: torch.device) -> None:
    """The error about other options names the one call that restores all of its models."""
    first = kind.make()
    enable_group_offload(first, onload_device=device)
    second = kind.other(first)
    ref = weakref.ref(first)
    del first
    gc.collect()
    assert ref() is None
    with pytest.raises(StateError, match=r"^vae .* call disable_group_offload\(pipe\) first"):
        enable_group_offload(second, model_options={"vae": LEAVES})
    disable_group_offload(second)
    assert handle_of(second.vae) is None


# ---------------------------------------------------------------- offloaded by a call of its own


def test_options_of_a_models_own_call_win(kind: Kind, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    pipe = kind.make()
    handle = apply_group_offloading(pipe.transformer, device, **LEAVES)
    assert enable_group_offload(pipe, onload_device=device, **BLOCKS)["transformer"] is handle
    with pytest.raises(StateError, match=r"^transformer .*remove_group_offloading\(pipe\.transformer\)"):
        enable_group_offload(pipe, model_options={"transformer": BLOCKS})
    assert torch.equal(kind.run(pipe), kind.expected(device))
    disable_group_offload(pipe)
    assert handles_of(pipe) == {"transformer": handle}
    assert "To restore it, call remove_group_offloading(pipe.transformer)" in caplog.text
    assert enable_group_offload(pipe, onload_device=device, exclude_modules="transformer").keys() == models_of(
        pipe
    ).keys() - {"transformer"}
    assert handle.is_active


def test_a_component_that_is_part_of_another_goes_with_it(kind: Kind, device: torch.device) -> None:
    """Hazard: each is refused because the other one is offloaded, and neither can be restored first."""
    pipe = kind.make()
    components = {"block": pipe.transformer.transformer_blocks[0], **pipe.components}
    both = SimpleNamespace(components=components)
    for option in ({"exclude_modules": "block"}, {"model_options": {"block": LEAVES}}):
        with pytest.raises(ConfigError, match="Give no options for block: it is part of another component"):
            enable_group_offload(both, onload_device=device, **option)
    for _ in range(2):
        assert enable_group_offload(both, onload_device=device).keys() == models_of(pipe).keys()
    assert torch.equal(kind.run(pipe), kind.expected(device))
    disable_group_offload(both)
    assert not handles_of(pipe)


@pytest.mark.parametrize("what", ["a part of it", "a module around it"])
def test_a_component_that_is_offloaded_in_part_or_in_another_module(
    what: str, kind: Kind, device: torch.device
) -> None:
    """The error names it, and no model of the pipeline is offloaded."""
    pipe = kind.make()
    other = pipe.transformer.transformer_blocks[0] if what == "a part of it" else nn.Sequential(pipe.transformer)
    handle = apply_group_offloading(other, device)
    with pytest.raises(StateError, match=r"FluxTransformer2DModel.* is already offloaded"):
        enable_group_offload(pipe, onload_device=device)
    assert not handles_of(pipe)
    disable_group_offload(pipe)
    assert handle.is_active
    handle.remove()
    assert enable_group_offload(pipe).keys() == models_of(pipe).keys()


def test_a_component_with_two_names(kind: Kind, device: torch.device) -> None:
    """Options of either name are its own, and it's excluded if one of its names is."""
    pipe = kind.make()
    both = SimpleNamespace(components={**pipe.components, "decoder": pipe.vae})
    enable_group_offload(both, onload_device=device, exclude_modules="decoder")
    assert handle_of(pipe.vae) is None and next(pipe.vae.parameters()).device == device
    disable_group_offload(both)
    disagreeing = {"vae": LEAVES, "decoder": BLOCKS}
    with pytest.raises(ConfigError, match=r"decoder"):
        enable_group_offload(both, onload_device=device, model_options=disagreeing)
    handles = enable_group_offload(both, onload_device=device, model_options={"decoder": LEAVES})
    assert handles["vae"].config.offload_type == "leaf_level"


def test_in_a_forward_nothing_is_restored(kind: Kind, device: torch.device) -> None:
    """Hazard: the other models are restored, and then the one that runs is refused."""
    pipe = kind.make()
    handles = enable_group_offload(pipe, onload_device=device)

    def disable(*_: Any) -> None:
        with pytest.raises(StateError, match=f"^{type(pipe.transformer).__name__} is in the middle of a forward"):
            disable_group_offload(pipe)
        refused.append(handles_of(pipe))

    refused: list[dict[str, Any]] = []
    hook = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(disable)
    assert torch.equal(kind.run(pipe), kind.expected(device)) and refused and all(each == handles for each in refused)
    hook.remove()
    assert enable_group_offload(pipe) == handles
    disable_group_offload(pipe)
    assert not handles_of(pipe)


# ---------------------------------------------------------------- added, replaced, given up


@pytest.mark.parametrize("change", ["added", "replaced", "removed alone"])
def test_the_next_call_offloads_what_is_new(change: str, kind: Kind, device: torch.device) -> None:
    """As the others were. Excluded models stay excluded, until the call says otherwise. Hazard: a component that was
    added later is never offloaded."""
    pipe = kind.make()
    vae = pipe.vae
    if change == "added":
        pipe.vae = None
    first = enable_group_offload(pipe, onload_device=device, exclude_modules="text_encoder", **LEAVES)
    if change == "removed alone":
        first["vae"].remove()
    else:
        pipe.vae = vae if change == "added" else kind.make().vae
    handles = enable_group_offload(pipe)
    assert handles.keys() == models_of(pipe).keys() - {"text_encoder"}
    assert handles["transformer"] is first["transformer"] and handles["vae"].config.offload_type == "leaf_level"
    assert torch.equal(kind.run(pipe), kind.expected(device))
    assert enable_group_offload(pipe, exclude_modules=None).keys() == models_of(pipe).keys()


@pytest.mark.parametrize("how", ["None", "meta"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["text_encoder_2", "transformer"])  # diffusers has a `to` of its own
def test_what_was_given_up_is_forgotten(
    name: str, how: str, when: str, kind: Kind, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Hazard: a component that was replaced is kept in memory."""

    def give_up() -> None:
        if how == "meta":
            getattr(pipe, name).to("meta")
        else:
            setattr(pipe, name, None)

    pipe = kind.make()
    if when == "after":
        enable_group_offload(pipe, onload_device=device, model_options={name: LEAVES})
    give_up()
    others = {"text_encoder", "text_encoder_2", "transformer", "vae"} - {name}
    assert enable_group_offload(pipe, onload_device=device).keys() == others
    disable_group_offload(pipe)
    assert not handles_of(pipe) and not caplog.text


# ---------------------------------------------------------------- cast, moved


@pytest.mark.filterwarnings("ignore:`torch_dtype` is deprecated:FutureWarning")
@pytest.mark.parametrize("call", ["to", "from_pipe"])
def test_a_cast_of_a_pipeline_says_what_it_left(
    call: str, kind: Kind, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Hazard: `pipe.to(dtype)` leaves out offloaded components silently."""

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "group_offload"]

    pipe = kind.make()
    enable_group_offload(pipe, onload_device=device, exclude_modules="vae")
    if call == "to" or kind.is_modular:  # modular pipelines have no from_pipe
        pipe.to(torch.bfloat16)
    else:
        diffusers.FluxImg2ImgPipeline.from_pipe(pipe, torch_dtype=torch.bfloat16)
    assert pipe.transformer.dtype == torch.float32 and pipe.vae.dtype == torch.bfloat16
    (message,) = said()
    assert "transformer" in message and "vae" not in message and ".to(torch.bfloat16)" in message
    caplog.clear()
    for model in models_of(pipe).values():
        model.to(torch.bfloat16)  # what the message says
    pipe.to(torch.bfloat16)
    assert not said()
    expected = kind.make()
    expected.to(device, torch.bfloat16)
    assert torch.equal(kind.run(pipe), kind.run(expected))


# ---------------------------------------------------------------- device memory that nobody gave


def _budgets(pipe: Any) -> set[Any]:
    found = {handle.config.vram_budget for handle in handles_of(pipe).values()}
    disable_group_offload(pipe)
    return found


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "auto"),
        ({"vram_budget": None}, None),
        ({"vram_budget": "1GiB"}, 1 << 30),
        ({"low_cpu_mem_usage": True}, None),
        ({"ram_budget": "6GiB"}, "auto"),
    ],
    ids=str,
)
def test_a_pipeline_fills_the_device_by_itself(options: dict[str, Any], wanted: Any, tmp_path: Path) -> None:
    pipe = tiny.flux_pipeline()
    pipe.save_pretrained(tmp_path)
    with use_simulated_device(SimulatedDevice(0, "lazy")):
        enable_group_offload(pipe, **options)
        assert {handle.config.interleave_forwards for handle in handles_of(pipe).values()} == {"auto"}
        assert _budgets(pipe) == {wanted}
        assert _budgets(from_pretrained(diffusers.FluxPipeline, tmp_path, **options)) == {wanted}
        model = from_pretrained(diffusers.FluxTransformer2DModel, tmp_path / "transformer", **options)
        assert (handle_of(model).config.vram_budget, handle_of(model).config.interleave_forwards) == (wanted, "auto")
        remove_group_offloading(model)
