"""Which model of a pipeline is taken to run next."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from group_offload.runtime.prefetch.phase_order import PhaseOrder


class Memory:
    wanted_bytes = 0


class Model:
    def __init__(self, name: str) -> None:
        self.name = name
        self.memory = Memory()


class Company:
    """Models by their first letters: e, t and v run in this order, and c is in no order."""

    def __init__(self) -> None:
        self.models = {name: Model(name) for name in "etvc"}
        e, t, v, _ = self.models.values()
        self.phase_order = PhaseOrder([*self.models.values()], [e, t, v], [e, v])

    def play(self, passes: str) -> str:
        """The models that should run after each of these passes, "." for the same one or none."""
        found = [self.phase_order.begin(self.models[name], "root") for name in passes]
        return "".join("." if next_model is None else next_model.name for next_model in found)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        # The order of the pipeline is a first guess. How many steps there are is not known, nor what comes after an image.
        (["etttv"], "t...."),
        (["etttv"] * 2, "t..ve"),
        # Two models that alternate predict each other.
        (["ectctctv"], "t..tctc."),
        # The last step is taken for one more, and the first step of the next image is not taken for the last.
        (["ectctctv"] * 2, "ctctctce"),
        # Another number of steps is learnt in two images.
        (["etttv"] * 3 + ["ettv"] * 4, "t.ve"),
        (["etttv"] * 3 + ["etttttv"] * 4, "t....ve"),
    ],
)
def test_what_comes_next_is_learnt(images: list[str], expected: str) -> None:
    company = Company()
    assert [company.play(image) for image in images][-1] == expected


def test_parts_of_a_model_are_told_apart() -> None:
    """An autoencoder encodes before the first step, and decodes after the last."""
    company = Company()
    e, t, v, _ = company.models.values()

    def image() -> list[Model | None]:
        passes = [(v, "encoder"), (t, "root"), (t, "root"), (v, "decoder"), (e, "root")]
        return [company.phase_order.begin(model, top) for model, top in passes]

    image()
    image()
    assert image() == [t, None, v, e, v]


def test_models_that_run_at_once() -> None:
    """Hazard: a server decodes one image while it denoises another, and a forward raises "deque mutated during iteration"."""
    company = Company()

    def play(name: str) -> None:
        for _ in range(5000):
            company.play(name)
            company.phase_order.protected_from(company.models[name])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(play, "etv"))
    finally:
        sys.setswitchinterval(before)
