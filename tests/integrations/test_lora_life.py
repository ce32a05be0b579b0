"""LoRAs as users live with them: swapped, weighed, fused, taken out, and loaded wrongly, for as long as the process runs.

A resident and an offloaded pipeline go through the same calls. Outputs and weights are the same bits, and errors are
diffusers' own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from peft import LoHaConfig, LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from group_offload import ModuleError, apply_group_offloading, enable_group_offload

from ..matrix.case import mapped
from ..support import tiny_models as tiny
from ..support.models import Model, inputs, make
from ..support.on_device import forward as forward_on
from ..support.on_device import offload as offload_on
from ..support.rigs import run
from ..support.simulated import SimulatedDevice, use_simulated_device

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted:UserWarning"),
    pytest.mark.filterwarnings("ignore:Already (un)?merged:UserWarning"),
]

MODELS = ("transformer", "text_encoder")
FEW = ("attn.to_q", "attn.to_k", "proj_mlp")
OTHERS = ("attn.to_q", "attn.to_v", "proj_out")
TIERS = ("ram", "files", "checkpoint", "checkpoint and files")

Step = Callable[[Any], Any]


def transformer() -> FluxTransformer2DModel:
    return tiny.flux_transformer(4, num_layers=1, num_single_layers=2)


def pipeline() -> FluxPipeline:
    """What LoRAs are for, of a pipeline."""
    parts = dict.fromkeys(("vae", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), text_encoder=tiny.clip(2, 1), transformer=transformer(), **parts
    )


def lora(seed: int, rank: int = 4, names: tuple[str, ...] = FEW, *, dora: bool = False, words: bool = False) -> Any:
    """A LoRA as it comes from a file: of the transformer and, with `words`, of the text encoder too."""
    parts = {"transformer": tiny.lora_of(transformer(), names, rank, seed)}
    if words:
        parts["text_encoder"] = tiny.lora_of(tiny.clip(2, 1), ("q_proj", "v_proj"), rank, seed)
    state = {f"{part}.{name}": each.cpu() for part, found in parts.items() for name, each in found.items()}
    for name, each in parts["transformer"].items() if dora else ():
        if "lora_B" in name:
            magnitudes = tiny.randn(len(each), seed=seed).cpu().abs() + 0.5
            state[f"transformer.{name.replace('lora_B.weight', 'lora_magnitude_vector')}"] = magnitudes
    return state


def load(state: Any, name: str, **options: Any) -> Step:
    # Each pipeline gets tensors of its own: peft may exchange those of a larger rank for the pipeline's.
    return lambda pipe: pipe.load_lora_weights({k: v.clone() for k, v in state.items()}, adapter_name=name, **options)


def add(config: Any, name: str, way: str = "inject") -> Step:
    def step(pipe: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            if way == "inject":
                inject_adapter_in_model(config, pipe.transformer, adapter_name=name)
            else:
                pipe.transformer.add_adapter(config, name)

    return step


def forward(pipe: Any) -> list[torch.Tensor]:
    dtype = pipe.transformer.x_embedder.weight.dtype
    arguments = mapped(tiny.flux_inputs(), lambda value: value.to("cpu", dtype if value.is_floating_point() else None))
    words = {"input_ids": torch.tensor([[0, 5, 7, 9, 2]]), "return_dict": False}
    return [tiny.call(pipe.transformer, arguments), tiny.call(pipe.text_encoder, words)]


class Twins:
    """A resident and an offloaded pipeline, on the CPU, because fusing is a matrix product that devices round differently."""

    def __init__(self, tier: str, level: str, root: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.tier, self.root, self.folder, self.dtype = tier, root, root / "groups", dtype
        if tier in ("files", "checkpoint and files"):
            options["offload_to_disk_path"] = self.folder
        elif tier == "checkpoint":
            options["offload_device"] = "disk"
        self.options = {"offload_type": level, **options}
        self.start()

    def start(self) -> None:
        """As a new process does."""
        self.resident, self.offloaded = (pipeline().to(self.dtype) for _ in range(2))
        if self.tier.startswith("checkpoint"):
            for name in MODELS:
                model = getattr(self.resident, name)
                if not (self.root / name).exists():
                    model.save_pretrained(self.root / name)
                loaded = type(model).from_pretrained(self.root / name, dtype=self.dtype).eval()
                setattr(self.offloaded, name, loaded)
        is_patched = hasattr(self.offloaded, "disable_group_offload")
        offload: Any = FluxPipeline.enable_group_offload if is_patched else enable_group_offload
        self.handles = offload(self.offloaded, "cpu", **self.options)

    def do(self, step: Step) -> BaseException | None:
        """Take a step with both: it raises the same, and returns the same tensors, if any."""
        errors: list[BaseException | None] = []
        results: list[Any] = []
        for pipe in (self.resident, self.offloaded):
            try:
                results.append(step(pipe))
            except (Exception, KeyboardInterrupt) as error:
                errors.append(error)
            else:
                errors.append(None)
        expected, found = errors
        assert (type(found), str(found)) == (type(expected), str(expected))
        if found is None and isinstance(results[0], dict):
            assert results[0].keys() == results[1].keys()
            assert all(torch.equal(value, results[1][key]) for key, value in results[0].items() if not value.is_meta)
        return found

    def check(self, passes: int = 2) -> None:
        """The same outputs, twice: the first forward may change what the second one computes with.

        Hazard: weights that a LoRA's file lacks stay on the meta device, and a CPU computes with garbage.
        """
        if self.lacks_weights:
            with pytest.raises(
                ModuleError,
                match=r"\.lora_A\..* is on the meta device.*LoRA file incomplete\? Call pipe\.delete_adapters",
            ):
                forward(self.offloaded)
            return
        outputs: list[list[torch.Tensor]] = []
        for _ in range(passes):
            if self.do(lambda pipe: outputs.append(forward(pipe))) is None:
                assert all(map(torch.equal, outputs[-1], outputs[-2]))

    @property
    def lacks_weights(self) -> bool:
        """Whether an adapter's file lacked some: on the CPU, torch (2.13) computes with garbage then."""
        return any(parameter.is_meta for parameter in self.resident.transformer.parameters())

    def check_weights(self) -> None:
        for name in MODELS:
            found, expected = (getattr(pipe, name).state_dict() for pipe in (self.offloaded, self.resident))
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert found[key].is_meta if value.is_meta else torch.equal(found[key], value), key

    @property
    def handle(self) -> Any:
        return self.handles["transformer"]

    def refresh(self) -> None:
        for handle in self.handles.values():
            if self.lacks_weights and handle is self.handle:
                with pytest.raises(ModuleError):
                    handle.refresh()
            else:
                handle.refresh()


# ------------------------------------------------------------------------------------------------ any sequence


def choose(rng: random.Random, twins: Twins) -> tuple[str, Step | None]:
    """The next thing that a user does, and its name; None for what is not done with both pipelines."""
    name, seed = rng.choice(["one", "two", "three"]), rng.randrange(1000)
    rank, names = rng.choice([2, 4, 8]), rng.choice([FEW, OTHERS])
    weights = {
        each: rng.choice([0.25, 0.5, 0.7, 1.0]) for each in rng.sample(["one", "two", "three"], rng.randint(1, 3))
    }
    some = [*MODELS] if rng.random() < 0.5 else ["transformer"]

    def edit(pipe: Any) -> None:
        layer = pipe.transformer.proj_out
        getattr(layer, "base_layer", layer).weight.data.mul_(1.5)

    def save(pipe: Any) -> Any:
        pipe.transformer.save_lora_adapter(twins.root / "saved", adapter_name=name, weight_name="x.safetensors")
        return load_file(twins.root / "saved" / "x.safetensors")

    fuse: dict[str, Any] = {"components": some, "lora_scale": rng.choice([0.5, 0.7, 1.0])}
    fuse |= {"adapter_names": rng.choice([None, [name]]), "safe_fusing": rng.random() < 0.2}
    steps: dict[str, Step | None] = {
        f"load {name}": load(lora(seed, rank, names), name),
        f"load {name} with words": load(lora(seed, rank, names, words=True), name),
        f"load DoRA {name}": load(lora(seed, rank, names, dora=True), name),
        f"inject LoHa {name}": add(LoHaConfig(r=2, target_modules=["to_q"], init_weights=False), name),
        f"add LoRA {name}": add(
            LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False), name, "add"
        ),
        f"swap {name}": load(lora(seed, rank, names), name, hotswap=True),
        f"set {weights}": lambda pipe: pipe.set_adapters([*weights], [*weights.values()]),
        f"fuse {fuse}": lambda pipe: pipe.fuse_lora(**fuse),
        f"unfuse {some}": lambda pipe: pipe.unfuse_lora(components=some),
        f"delete {name}": lambda pipe: pipe.delete_adapters(name),
        "unload": lambda pipe: pipe.unload_lora_weights(),
        "disable": lambda pipe: pipe.disable_lora(),
        "enable": lambda pipe: pipe.enable_lora(),
        "prepare": lambda pipe: pipe.enable_lora_hotswap(target_rank=8, check_compiled="ignore"),
        f"load {name}, which lacks weights": load(dict([*lora(seed, rank, names).items()][1:]), name),
        f"load {name}, which does not fit": load({**lora(seed), next(iter(lora(seed))): torch.zeros(3, 3)}, name),
        "edit": edit,
        f"save {name}": save,
        "forward": None,
        "forward again": None,
        "compare": None,
        "refresh": None,
        "restart": None,
    }
    if twins.lacks_weights:
        del steps[f"fuse {fuse}"]  # garbage
    chosen = rng.choice([*steps])
    return chosen, steps[chosen]


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence(seed: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Whatever a user does, and in whatever order. Odd seeds use diffusers' own calls, on this engine. Hazard: LoRAs
    are loaded, fused or deleted wrongly in an order nobody tried; `fuse_lora` on files does nothing; with weights in files a
    LoRA is a `KeyError`, or wrong (diffusers #10914, #11648, #11791, #11804)."""
    if seed % 2:
        request.getfixturevalue("patched")
    rng = random.Random(seed)
    tier, level = TIERS[seed // 2 % 4], rng.choice(["block_level", "leaf_level"])
    dtype, budget = rng.choice([torch.float32, torch.bfloat16]), {"ram_budget": "8GiB"} if seed % 3 == 0 else {}
    twins = Twins(tier, level, tmp_path, dtype, **budget)
    done = [f"{tier}, {level}, {dtype}"]
    try:
        for _ in range(25):
            name, step = choose(rng, twins)
            done.append(name)
            if step is not None:
                twins.do(step)
            elif name == "refresh":
                twins.refresh()
            elif name == "compare":
                twins.check_weights()
            elif name == "restart":
                twins.start()
            else:
                twins.check()
        twins.check()
        for handle in twins.handles.values():
            handle.remove()
        twins.check_weights()
    except BaseException:
        print(*done, sep="\n")
        raise


# ------------------------------------------------------------------------------------------------ swaps


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("tier", "level", "order", "repeated"),
    [
        ("ram", "block_level", "offloaded first", True),
        ("files", "leaf_level", "offloaded between", False),
        ("checkpoint", "block_level", "offloaded last", True),
    ],
)
def test_hot_swaps_of_a_compiled_model(tier: str, level: str, order: str, repeated: bool, tmp_path: Path) -> None:
    """LoRAs of several ranks and scales: nothing is compiled again, and nothing is cut into groups again.

    But for once: the first swap takes an adapter that was offloaded to group files to RAM.

    Hazard: swapping LoRAs of an offloaded, compiled model compiles it again (diffusers #11423).
    """
    twins = Twins(tier, level, tmp_path)
    if order != "offloaded first":
        for handle in twins.handles.values():
            handle.remove()

    def offload(when: str) -> None:
        if order == when:
            twins.handles = {
                name: apply_group_offloading(getattr(twins.offloaded, name), "cpu", **twins.options) for name in MODELS
            }

    def compile_blocks(pipe: Any) -> None:
        graphs[pipe] = CompileCounterWithBackend("eager")
        if repeated:
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=graphs[pipe])
            return
        for block in (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks):
            block.compile(fullgraph=True, backend=graphs[pipe])

    graphs: dict[Any, Any] = {}
    twins.do(lambda pipe: pipe.enable_lora_hotswap(target_rank=8))
    twins.do(load(lora(0, rank=4), "one"))
    offload("offloaded between")
    twins.do(compile_blocks)
    offload("offloaded last")
    twins.check()
    compiled = graphs[twins.offloaded].frame_count
    assert compiled > 0 and not counters["graph_break"]
    before = twins.handle.stats()
    bytes_before = bytes_in(twins.folder)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(1, 5):
            twins.do(load(lora(seed, rank=[2, 4, 8][seed % 3]), "one", hotswap=True))
            twins.check()
            before = twins.handle.stats() if seed == 1 else before
    assert graphs[twins.offloaded].frame_count == compiled
    after = twins.handle.stats()
    for name in ("rebuilds", "host_bytes", "pinned_bytes"):
        assert getattr(after, name) == getattr(before, name), name
    assert bytes_in(twins.folder) == bytes_before


def bytes_in(folder: Path) -> tuple[int, int]:
    sizes = [file.stat().st_size for file in folder.glob("*")]
    return len(sizes), sum(sizes)


# ------------------------------------------------------------------------------------------------ off, and wrong


@pytest.mark.parametrize(("tier", "level"), [*zip(TIERS, ["block_level", "leaf_level"] * 2, strict=True)])
def test_a_fused_lora_that_is_switched_off(tier: str, level: str, tmp_path: Path) -> None:
    """peft takes it out of the weights in the middle of the next forward. A refresh does not. Hazard: peft does that
    through `.data`, which goes unnoticed."""
    twins = Twins(tier, level, tmp_path)
    twins.do(load(lora(1, words=True), "one"))
    twins.do(lambda pipe: pipe.fuse_lora(components=[*MODELS]))
    twins.check()
    twins.do(lambda pipe: pipe.disable_lora())
    twins.refresh()
    twins.check_weights()
    for step in ("enable_lora", "disable_lora", "enable_lora", "unload_lora_weights"):
        twins.do(lambda pipe, step=step: getattr(pipe, step)())
        twins.check()
        if step == "disable_lora":
            twins.check_weights()


@pytest.mark.parametrize("tier", ["ram", "file"])
def test_a_merged_adapter_that_is_switched_off_on_a_device(tier: str, tmp_path: Path) -> None:
    """The first groups of the pass are on their way there already, with the adapter in them. Hazard: peft unmerges it
    in a forward that has prefetched the merged weights."""
    model = make(Model)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False), model, "one")
    for seed, laziness in enumerate(("eager", "lazy", "random")):
        device = SimulatedDevice(seed, laziness)
        with use_simulated_device(device):
            handle = offload_on(model, **({} if tier == "ram" else {"offload_to_disk_path": tmp_path}))
            for is_on in (True, False, True, True, False):
                for layer in layers_with_adapters(model):
                    layer.enable_adapters(enabled=True)
                    if is_on and not layer.merged:
                        layer.merge()
                forward_on(device, model, inputs())
                for layer in layers_with_adapters(model):
                    layer.enable_adapters(enabled=is_on)
                found = device.get(forward_on(device, model, inputs()))
                assert all(layer.merged == is_on for layer in layers_with_adapters(model))
                twin = make(Model)
                twin.load_state_dict({name.replace("base_layer.", ""): value for name, value in plain(model).items()})
                assert torch.equal(found, run(twin, inputs()))
            handle.remove()


def layers_with_adapters(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "merged_adapters")]


def plain(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora_" not in name}
