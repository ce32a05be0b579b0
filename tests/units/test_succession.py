"""Which model of a pipeline is taken to run next, and when something is done for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from group_offload.runtime.foresight.succession import Succession


class Model:
    """What is asked of a model, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_reading = False
        self.cached_bytes = 0
        self.steps_to_read = 0
        self.asked: list[str] = []
        self.ahead = self

    def plan_cache_reads(self, beside_bytes: int) -> None:
        self.asked.append(f"plan beside {beside_bytes}")

    def go_on(self, is_idle: Callable[[], bool]) -> bool:
        assert is_idle()
        self.asked.append("read")
        self.steps_to_read -= 1
        return self.steps_to_read > 0

    def stop(self) -> None:
        self.asked.append("stop")

    def read_first(self) -> None:
        self.asked.append("first")

    def take_over(self) -> None:
        self.asked.append("take over")


class Company:
    """Models by their first letters: e, t and v run in this order, and c is in no order."""

    def __init__(self) -> None:
        self.models = {name: Model(name) for name in "etvc"}
        e, t, v, _ = self.models.values()
        self.succession = Succession([*self.models.values()], [e, t, v], [e, v])

    def play(self, passes: str) -> str:
        """The models that should run after each of these passes, "." for the same one or none."""
        found = [self.succession.begin(self.models[name], "root") for name in passes]
        return "".join("." if heir is None else heir.name for heir in found)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        # The order of the pipeline is a first guess. How many steps there are is not known, nor what comes after an image.
        (["etttv"], "t...."),
        (["etttv"] * 2, "t..ve"),
        # Two models that alternate foresee each other.
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
        return [company.succession.begin(model, top) for model, top in passes]

    image()
    image()
    assert image() == [t, None, v, e, v]


def test_reads_end_when_another_model_runs() -> None:
    company = Company()
    e, t = company.models["e"], company.models["t"]
    t.steps_to_read = 9
    company.play("e")
    company.succession.look(e)
    company.play("v")
    assert t.asked == ["plan beside 0", "read", "first", "stop"]


def test_files_of_a_model_that_has_just_run_are_not_read_again() -> None:
    """Two models that alternate in each step would look through their files each time."""
    company = Company()
    company.play("etctctv")
    c, t = company.models["c"], company.models["t"]
    company.play("ect")
    t.asked.clear()
    company.play("c")
    company.succession.look(c)
    assert not [asked for asked in t.asked if asked.startswith("plan")]
