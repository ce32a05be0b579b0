"""Raises in the middle of the package's own code, and looks whether what comes after is right.

A sweep strikes one operation (a forward, a backward, a set-up, a refresh, a remove; a training step whose activations are
offloaded) in one scenario, at lines and function entries, one at a time, in one model all along, with whole forwards and an
edit after each. tests/engine/test_interrupts.py says which of them are run.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import fcntl
import gc
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

import group_offload
from group_offload import StateError, apply_activation_offloading, apply_group_offloading, free_device_buffers
from group_offload.base.saved import Kept
from group_offload.runtime.prefetch.phase_order import PhaseOrder

from .support import models, simulated
from .support.activations import on
from .support.asserts import same_bits, snapshot
from .support.folders import headers_in
from .support.inside import engine_of
from .support.models import WIDTH, Model
from .support.on_device import compression, lay_in_file
from .support.simulated import SimulatedDevice, use_simulated_device
from .support.training import DIM, TOKENS
from .support.training import make as make_trained
from .support.tuning import tune

_NUM_COUNTED = 2
"""Operations of which one sees where they come: no two are the same."""
_NUM_STEPS = 50
"""Training steps that one model is struck in: each that is broken off leaves two streams for a simulated device to order."""
_MANY = 20
"""Failures after which a sweep ends."""
PACKAGE = str(Path(group_offload.__file__).parent)
T = TypeVar("T")


@cache
def unstruck(code: CodeType) -> frozenset[int]:
    """The offsets at which Python raises nothing from a signal, and where an error would leave a lock taken.

    One is where the code leaves a `with` block, back on the line that began it: a lock that is written in C is let go by the
    instruction that comes next. The other is a `try:` within a `with` block. Its only instruction does nothing, and the
    compiler leaves it out of the range in which an error ends the block.
    """
    begins, tries = _lines(code.co_filename)
    first: dict[int, int] = {}
    found = set()
    for start, _, line in code.co_lines():
        if line in tries or (line in begins and first.setdefault(line, start) != start):
            found.add(start)
    return frozenset(found)


@cache
def _lines(path: str) -> tuple[frozenset[int], frozenset[int]]:
    """The lines of a file that begin a `with` block, and those that begin a `try` within one."""
    blocks = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.With)]
    tries = [node.lineno for block in blocks for node in ast.walk(block) if isinstance(node, ast.Try)]
    return frozenset(block.lineno for block in blocks), frozenset(tries)


Place = tuple[CodeType, int]
"""A line of a function; 0 for the entry of it."""


class Strike:
    """Raises when this thread comes to `place` in the package's own code for the `at`-th time; never if `at` is 0."""

    def __init__(
        self,
        at: int = 0,
        error: type[BaseException] = KeyboardInterrupt,
        *,
        place: Place | None = None,
        path: str = PACKAGE,
    ) -> None:
        """
        Args:
            place: None for any.
            path: what its files' paths begin with.
        """
        self.places: Counter[Place] = Counter()
        """How often it came where."""
        self.where = ""
        self.is_lost = False
        """Where Python closes a generator, or calls a finalizer, nobody sees what is raised."""
        self._left = at
        self._place = place
        self._error = error
        self._path = path
        self._before: Any = None

    def __enter__(self) -> Strike:
        self._before = sys.gettrace(), sys.unraisablehook
        sys.unraisablehook = self._lose
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        trace, sys.unraisablehook = self._before
        sys.settrace(trace)

    def _lose(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, self._error):
            self._before[1](unraisable)
        self.is_lost = True

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._place is not None and frame.f_code is not self._place[0]:
            return None
        if not frame.f_code.co_filename.startswith(self._path) or self.where:
            return None
        if event == "call" or (event == "line" and frame.f_lasti not in unstruck(frame.f_code)):
            place = frame.f_code, frame.f_lineno if event == "line" else 0
            self.places[place] += 1
            self._left -= self._place is None or self._place == place
            if not self._left:
                self._left = -1
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({event} {frame.f_code.co_name})"
                raise self._error(self.where)
        return self._trace


def contained(work: Callable[[], T]) -> T:
    """Call it. A generator's frame keeps to itself which exception is being handled.

    Python 3.11 does not: where a trace function raises in the last line of an `except` block, the exception of that block
    stays "being handled" for as long as the thread lives, and with it all that the frames of its traceback hold.
    """

    def once() -> Iterator[T]:
        yield work()

    return next(once())


# ---------------------------------------------------------------- models


class Wide(nn.Module):
    """Frozen layers that are worth compressing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 400), nn.ReLU(), nn.Linear(400, WIDTH))
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.bfloat16()).float()


class Block(models.Block):
    """Frozen layers, and a small one beside them that may be trained."""

    def __init__(self, *, is_wide: bool) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.lora = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide = Wide() if is_wide else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) + 0.1 * self.lora(x)
        return x if self.wide is None else x + self.wide(x)


def make(num_blocks: int = 5, *, is_wide: bool = False) -> Any:
    model = Model(0).requires_grad_(False)
    model.blocks.extend(Block(is_wide=is_wide) for _ in range(num_blocks))
    return model


def _let_be_skipped(block: nn.Module) -> None:
    """Put a hook of diffusers around a block's forward that could skip it, and does not."""
    from diffusers.hooks import HookRegistry  # takes seconds
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
    from diffusers.hooks.layer_skip import TransformerBlockSkipHook

    TransformerBlockRegistry.register(type(block), TransformerBlockMetadata(return_hidden_states_index=0))
    HookRegistry.check_if_exists_or_initialize(block).register_hook(TransformerBlockSkipHook(dropout=0.0), "skip")


# ---------------------------------------------------------------- what is swept


SCENARIOS: dict[str, dict[str, Any]] = {
    "cpu ram": {},
    "cpu ram leaf": {"offload_type": "leaf_level"},
    "cpu files": {"in_files": True},
    "cpu files leaf": {"in_files": True, "offload_type": "leaf_level"},
    "cpu checkpoint": {"in_checkpoint": True},
    "simulated ram": {},
    "simulated ram leaf": {"offload_type": "leaf_level"},
    "simulated record_stream": {"record_stream": True},
    "simulated no stream": {"use_stream": False},
    "simulated ram, not pinned": {"low_cpu_mem_usage": True},
    "simulated files": {"in_files": True},
    "simulated files leaf": {"in_files": True, "offload_type": "leaf_level"},
    "simulated checkpoint": {"in_checkpoint": True},
    "simulated budget": {"vram_budget": 30_000, "in_checkpoint": True},
    "simulated, blocks that a hook may skip": {"has_skips": True},
    "simulated compressed": {"compress": True},
    "simulated compressed files": {"compress": True, "in_checkpoint": True, "reads_compressed": True},
    "simulated compressed, budget": {"compress": True, "vram_budget": 150_000},
    "simulated pipeline": {"in_checkpoint": True, "in_pipeline": True},
    "simulated pipeline, budget": {"vram_budget": 30_000, "in_pipeline": True},
}
"""A device, a tier and a level, and the options for them. `Rig` takes some of these, and `apply_group_offloading` the rest."""


class Rig:
    """A model, offloaded, beside its resident copy and another offloaded model on the same device."""

    def __init__(self, scenario: str, stack: ExitStack, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._rng = random.Random(seed)
        self.taken_out: list[nn.Module] = []
        self.device = SimulatedDevice(seed, "random") if scenario.startswith("simulated") else None
        self.running: Callable[[], Any] = contextlib.nullcontext
        self._put = self._get = torch.clone
        if self.device is not None:
            stack.enter_context(use_simulated_device(self.device))
            self.running, self._put, self._get = self.device.running, self.device.put, self.device.get
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.options = dict(SCENARIOS[scenario])
        tune(stack.enter_context(pytest.MonkeyPatch.context()), device_margin_bytes=0)
        if self.options.get("compress"):
            stack.enter_context(compression(pinned_share=0.0 if self.options.pop("reads_compressed", False) else 0.5))
        self.resident = make(is_wide=bool(self.options.get("compress")))
        self.model = copy.deepcopy(self.resident)
        if self.options.pop("has_skips", False):
            for block in (*self.resident.blocks, *self.model.blocks):
                _let_be_skipped(block)
        if self.options.pop("in_files", False):
            self.options["offload_to_disk_path"] = self.folder
        self._in_checkpoint = self.options.pop("in_checkpoint", False)
        self.in_pipeline = self.options.pop("in_pipeline", False)
        """Whether the other model is predicted to come after the first one."""
        if self._in_checkpoint:
            self.options["offload_to_disk_path"] = self.folder
            lay_in_file(self.model, self.folder / "model.safetensors")
        for model in (self.resident, self.model):
            model.blocks[1].up.bias = model.blocks[0].up.bias
        self._before = snapshot(self.model)
        self.handle: Any = None
        self.other_resident = make(3)
        self.other = copy.deepcopy(self.other_resident)
        budget = (
            {"vram_budget": self.options["vram_budget"]} if self.in_pipeline and "vram_budget" in self.options else {}
        )
        self.other_handle = apply_group_offloading(self.other, "cpu", **budget)
        self._held = 0

    def apply(self) -> None:
        self.handle = apply_group_offloading(self.model, "cpu", **self.options)
        if self.in_pipeline:
            models = [engine_of(each)._passes for each in (self.handle, self.other_handle)]
            phase_order = PhaseOrder(models, models, models)
            for each in models:
                each.phase_order = phase_order

    def forward(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), self.running():
            return self._get(model(self._put(x)))

    def step(self, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of what is trained, and of the input."""
        model.zero_grad()
        is_here = model is self.resident
        with contextlib.nullcontext() if is_here else self.running():
            x = (x.clone() if is_here else self._put(x)).requires_grad_()
            model(x).square().sum().backward()
            grads = [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]
            return grads if is_here else [*map(self._get, grads)]

    def edit(self) -> None:
        """Below autograd, as fusing a LoRA does; in both models."""
        self._edit(self.model, self.resident)

    def _edit(self, model: nn.Module, resident: nn.Module) -> None:
        name = self._rng.choice([name for name, p in model.named_parameters() if not p.requires_grad])
        factor = self._rng.choice([0.5, 0.75, 1.25])
        resident.get_parameter(name).data.mul_(factor)
        with self.running():
            model.get_parameter(name).data.mul_(factor)

    def look(self, *, trains: bool = False, num_passes: int = 2) -> None:
        """Whole passes give the resident model's bits."""
        for number in range(num_passes):
            x = torch.randn(3, WIDTH)
            actual, expected = self.forward(self.model, x), self.resident(x).detach()
            assert same_bits(actual, expected), f"forward {number + 1} is off by {(actual - expected).abs().max()}"
        if trains:
            x = torch.randn(3, WIDTH)
            for ours, theirs in zip(self.step(self.model, x), self.step(self.resident, x), strict=True):
                assert same_bits(ours, theirs), f"gradients are off by {(ours - theirs).abs().max()}"
        assert self.device is None or not self.device.errors, self.device.errors[0]

    def look_at_other(self) -> None:
        """It takes its turn in the same memory of the device. What was interrupted may keep its own for one turn more."""
        self._edit(self.other, self.other_resident)
        for _ in range(3):
            x = torch.randn(3, WIDTH)
            assert same_bits(self.forward(self.other, x), self.other_resident(x).detach()), "the other model is wrong"
            if self.device is None:
                return
            if self.in_pipeline:
                free_device_buffers()  # which either model may have, as the next pass was predicted
            gc.collect()
            self.device.synchronize()
            held = self.device.allocated_bytes
            self._held = self._held or held
            if held == self._held:
                return
            self.look(num_passes=1)
        raise AssertionError(f"{held} bytes of the device are held after the other model, not {self._held}")

    def look_at_rest(self) -> None:
        with self.running():
            pairs = zip(self.model.state_dict().items(), self.resident.state_dict().values(), strict=True)
            for (name, actual), expected in pairs:
                assert torch.equal(actual, expected), f"{name} while offloaded is wrong"

    def look_unoffloaded(self) -> None:
        """The module is what it was before."""
        plain = snapshot(nn.LayerNorm(WIDTH))[""][1:5]  # see `_changed`
        for name, found in snapshot(self.model).items():
            is_as_before = found == self._before[name] if name in self._before else found[1:5] == plain
            assert is_as_before, f"{name or 'the root'} is another one than before, or has more"
        for name, parameter in self.model.named_parameters():
            assert not getattr(parameter, "_post_accumulate_grad_hooks", None), f"{name} has hooks of ours"
        self.look_at_rest()
        x = torch.randn(3, WIDTH)
        with torch.no_grad():
            assert same_bits(self.model(x), self.resident(x).detach()), "the module by itself is wrong"

    def look_at_folder(self) -> None:
        """The next set-up there would wait for this process, which does not know."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Everything is given back."""
        self.handle.remove()
        self.handle = None
        self.other_handle.remove()
        self.look_unoffloaded()
        if self.device is not None:
            free_device_buffers()
            gc.collect()  # what an interrupt broke off may be held by its own traceback
            _empty_leaked_graphs()
            self.device.synchronize()
            held = self.device.pinned_bytes, self.device.allocated_bytes
            assert held == (0, 0), f"{held[0]} bytes stay pinned, {held[1]} on the device"


def _empty_leaked_graphs() -> None:
    """torch never frees a graph in whose backward an unpack hook raised, anybody's: its memory is not the engine's."""
    for each in gc.get_objects():
        if type(each) is Kept:
            each._tensor = torch.empty(0)


Operation = Callable[[Rig, Any], None]


def _forward(rig: Rig, strike: Any) -> None:
    x = torch.randn(3, WIDTH)
    with strike:
        actual = rig.forward(rig.model, x)
    expected = rig.resident(x).detach()
    assert same_bits(actual, expected), f"the forward itself is off by {(actual - expected).abs().max()}"
    if rig.in_pipeline:
        rig.forward(rig.other, x)


def _backward(rig: Rig, strike: Any) -> None:
    x = torch.randn(3, WIDTH)
    with strike:
        rig.step(rig.model, x)


def _refresh(rig: Rig, strike: Any) -> None:
    rig.edit()
    with strike:
        rig.handle.refresh()


def _changed(rig: Rig, strike: Any) -> None:
    """A forward that finds a module more or less, and an edit: it has to cut the module into groups again."""
    for model in (rig.model, rig.resident):
        more = model.blocks[1]._modules.pop("more", None)
        if more is None:
            model.blocks[1].more = nn.LayerNorm(WIDTH).requires_grad_(False)
        else:
            rig.taken_out.append(more)  # whose gate goes
    rig.edit()
    _forward(rig, strike)


def _apply(rig: Rig, strike: Any) -> None:
    with strike:
        rig.apply()


def _remove(rig: Rig, strike: Any) -> None:
    rig.edit()
    with strike:
        rig.handle.remove()


def _free(rig: Rig, strike: Any) -> None:
    rig.look(num_passes=4)  # until groups stay on the device
    with strike:
        free_device_buffers()


_ALL = (_forward, _changed, _refresh, _backward, _free, _apply, _remove)
OPERATIONS: dict[str, Operation] = {each.__name__[1:]: each for each in _ALL}


@dataclass(frozen=True)
class Places:
    """Which places are struck, and at which of the times that an operation comes there."""

    most: int | None = None
    """So many, wherever and whenever; None for each place once, at a time chosen at random."""
    seed: int = 0

    def choose(self, found: Counter[Place]) -> list[tuple[Place, int]]:
        """
        Args:
            found: how often an operation comes where.
        """
        rng = random.Random(self.seed)
        places = sorted(found, key=lambda place: (place[0].co_filename, place[0].co_firstlineno, place[1]))
        if self.most is None:
            return [(place, rng.randint(1, found[place])) for place in places]
        chosen = [(place, at) for place in places for at in range(1, found[place] + 1)]
        return rng.sample(chosen, min(self.most, len(chosen)))


@dataclass
class Result:
    """What a sweep found."""

    struck: int = 0
    """How often the operation was struck."""
    failures: list[str] = field(default_factory=list)

    def strikes(self, strike: Strike, work: Callable[[], object], error: type[BaseException]) -> bool:
        """Do the work until it is struck. Whether it was: it may come to the place less often than before."""
        try:
            contained(work)
            if error is KeyboardInterrupt and strike.where and not strike.is_lost:
                self.failures.append(f"{strike.where}: nobody was told of the interrupt")
        except error:
            pass
        except Exception as other:
            if not strike.where:
                raise
            self.failures.append(f"{strike.where}: {type(other).__name__} in its place: {other}")
        self.struck += bool(strike.where)
        return bool(strike.where)

    @contextlib.contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """What is found wrong inside is a failure."""
        try:
            yield
        except Exception as problem:
            self.failures.append(f"{what}: {type(problem).__name__}: {problem}")


def _strike_again(
    begin: Callable[[], T],
    act: Callable[[T, Strike], None],
    look: Callable[[T, int], None],
    places: Places,
    error: type[BaseException] = KeyboardInterrupt,
    num_steps: int = 0,
) -> tuple[Result, T]:
    """Strike one model again and again; a new one after a failure, or after so many steps."""
    result, rig = Result(), begin()
    found: Counter[Place] = Counter()
    for _ in range(_NUM_COUNTED):
        counting = Strike()
        act(rig, counting)
        found |= counting.places
        if num_steps == 1:
            look(rig, 0)  # it may be the last that this model takes
            rig = begin()
    for number, (place, at) in enumerate(places.choose(found)):
        strike, num_failures = Strike(at, error, place=place), len(result.failures)
        if result.strikes(strike, partial(act, rig, strike), error):
            with result.noting(strike.where):
                look(rig, number)
        if len(result.failures) > _MANY:
            break
        if len(result.failures) > num_failures or (num_steps and number % num_steps == num_steps - 1):
            rig = begin()
    return result, rig


def sweep(scenario: str, operation: str, places: Places, error: type[BaseException] = KeyboardInterrupt) -> Result:
    """Strike an operation of one model; of a new one each time where that can happen once in its life."""
    trains, is_last = operation == "backward", operation in ("apply", "remove")
    leaves_files = operation == "refresh" and "in_files" in SCENARIOS[scenario]

    def begin() -> Rig:
        stack.close()
        rig = Rig(scenario, stack, places.seed)
        if operation != "apply":
            rig.apply()
            rig.look(trains=trains, num_passes=2 if is_last else 5)
        return rig

    def look(rig: Rig, number: int) -> None:
        if is_last:
            look_at_last(rig)
            return
        if operation == "free":
            free_device_buffers()  # once more: events that are spared twice would be those of two slots
            spare = engine_of(rig.handle).memory._spare_events
            assert len({id(event) for event in spare}) == len(spare)
        if number % 2 or leaves_files:
            rig.edit()
        rig.look(trains=trains and number % 4 == 0)
        if leaves_files:
            headers_in(rig.folder)  # which compares the data of files with their hashes
        if number % 7 == 0:
            rig.look_at_other()
        if number % 5 == 0:
            rig.look_at_rest()

    def look_at_last(rig: Rig) -> None:
        if operation == "apply":
            rig.look_at_folder()
            rig.handle = getattr(rig.model, "_group_offload_handle", None)
            if rig.handle is None:
                rig.look_unoffloaded()
                rig.apply()
        elif rig.handle.is_active:
            rig.edit()
            rig.look()
        rig.look() if rig.handle.is_active else rig.look_unoffloaded()
        rig.close()

    with ExitStack() as stack:
        result, rig = _strike_again(
            begin, OPERATIONS[operation], look, places, error, num_steps=int(is_last or leaves_files)
        )
        if not is_last and len(result.failures) <= _MANY:
            with result.noting("at the end"):
                rig.close()
    return result


# ---------------------------------------------------------------- activations


class TrainingRig:
    """A resident model whose activations are offloaded, beside its copy."""

    def __init__(self, where: str, seed: int, stack: ExitStack) -> None:
        self._put = self._get = torch.clone
        reference = make_trained().eval()
        self._expected = [self._gradients(reference, self.forward(reference, number)) for number in range(3)]
        self.model = copy.deepcopy(reference)
        self._put, self._get = stack.enter_context(on(where, self.model, seed))
        self._handle = apply_activation_offloading(self.model, device="cpu", min_bytes=0)

    def forward(self, model: nn.Module, number: int) -> torch.Tensor:
        x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(number))
        return model(self._put(x)).square().mean()

    def step(self, strike: Strike) -> None:
        """A step on input 0, beside the graph of an earlier forward."""
        self._earlier, self._graphs = self.forward(self.model, 1), list[torch.Tensor]()
        with strike:
            self._graphs.append(self.forward(self.model, 0))
            self._graphs[0].backward(retain_graph=True)

    def look(self, number: int) -> None:
        """The next step is right, before and after graphs from before the strike, which are right or refuse."""
        self._look(2, self.forward(self.model, 2))
        for given, graph in ((1, self._earlier), *((0, each) for each in self._graphs)):
            with contextlib.suppress(StateError):
                self._look(given, graph)
        self._look(2, self.forward(self.model, 2))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "hooks are left behind"
        del graph, self._earlier
        self._graphs.clear()
        gc.collect()
        stats = self._handle.stats()
        assert not stats.used_host_bytes, stats  # no graph is there any more

    def _look(self, number: int, loss: torch.Tensor) -> None:
        for actual, expected in zip(self._gradients(self.model, loss), self._expected[number], strict=True):
            assert same_bits(actual, expected), f"the gradients of input {number} are off"

    def _gradients(self, model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        loss.backward(retain_graph=True)
        found = [self._get(p.grad) for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found


def sweep_activations(where: str, places: Places) -> Result:
    """Strike the training step of one model whose activations are offloaded, on the CPU or on a simulated device."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        tune(patch, activation_segment_bytes=16 << 10)

        def begin() -> TrainingRig:
            stack.close()
            return TrainingRig(where, places.seed, stack)

        result, _ = _strike_again(begin, TrainingRig.step, TrainingRig.look, places, num_steps=_NUM_STEPS)
    return result


# ---------------------------------------------------------------- real signals


_ATOMIC = (simulated.__file__, _python_dispatch.__file__)
"""The simulated device, and what torch tells it of kernels by: the calls of a driver, which no signal breaks off."""


def _raise(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename in _ATOMIC:
            signal.setitimer(signal.ITIMER_REAL, 5e-5)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def strike_by_signals(scenario: str, seconds: float, seed: int = 0, least: int = 0) -> Result:
    """Forwards of one model under a timer's signals, which strike anywhere; whole ones in between.

    Args:
        least: so many strikes, however long they take.
    """
    rng = random.Random(seed)
    result = Result()
    before = signal.signal(signal.SIGALRM, _raise)
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None  # finalizers are struck too
    deadline = time.monotonic() + seconds
    try:
        with ExitStack() as stack:
            rig = Rig(scenario, stack, seed)
            rig.apply()
            rig.look()
            started = time.perf_counter()
            rig.forward(rig.model, torch.randn(3, WIDTH))
            length = max(2e-4, time.perf_counter() - started)
            while not result.failures and (time.monotonic() < deadline or result.struck < least):
                what = f"signal {result.struck + 1}"
                with result.noting(f"{what}, in its place"):
                    try:
                        signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-5, 1.2 * length))
                        _forward(rig, contextlib.nullcontext())
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except KeyboardInterrupt:
                        result.struck += 1
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                rig.edit()
                with result.noting(what):
                    rig.look()
            with result.noting("at the end"):
                rig.close()
    finally:
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
    return result
