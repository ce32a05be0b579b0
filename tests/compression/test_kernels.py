"""The kernel writes the bytes that the CPU writes, and stays inside of the image whatever it is given."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from group_offload.compression.codec import can_decompress, compress, decompress

from ..support.compression import check_kernel, compressed_of, compressible, image_of, weights, written_by

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


def in_a_process(*arguments: object) -> None:
    command = [sys.executable, "-m", "tests.support.compression", *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert found.returncode == 0, found.stderr


@needs_triton
def test_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    in_a_process(24, 6)


@needs_triton
def test_it_compiles_for_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    in_a_process("compile")


def test_the_cpu_needs_no_triton() -> None:
    image, (layout, data) = compressed_of([compressible()])
    assert torch.equal(written_by(lambda out: decompress(data, layout, out), layout.plain_bytes), image)
    assert "group_offload.compression.kernels" not in sys.modules


@pytest.mark.gpu
def test_on_a_device() -> None:
    check_kernel(torch.accelerator.current_accelerator() or "cpu", 40, 300)


@pytest.mark.gpu
def test_compressed_on_a_device_as_on_the_cpu() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None and can_decompress(device)
    for kinds in (["normal", "words", "sparse"], ["wide", "nan"], ["cauchy"] * 3):
        image, layout = image_of([*(weights(kind, 300_001) for kind in kinds), weights("normal", 2_000_000)])
        here, there = compress(image, layout), compress(image, layout, device)
        assert here is not None and there is not None
        assert there.layout == here.layout and torch.equal(there.data, here.data)


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_gibibytes() -> None:
    """Places beyond 2**31 bytes."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    part = weights("normal", 1 << 24)
    image, layout = image_of([part.repeat(72), weights("words", 1 << 20), part])
    found = compress(image.to(device), layout)
    assert found is not None
    data = found.data.to(device)
    out = written_by(lambda out: decompress(data, found.layout, out), layout.num_bytes, device)
    assert torch.equal(out.cpu(), image)
