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


def test_the_order_of_the_pipeline_is_a_first_guess() -> None:
    """The number of steps is not known, nor what comes after an image."""
    assert Company().play("etttv") == "t...."


def test_the_number_of_passes_is_learnt() -> None:
    company = Company()
    company.play("etttv")
    assert company.play("etttv") == "t..ve"


def test_two_models_that_alternate_foresee_each_other() -> None:
    company = Company()
    assert company.play("ectctctv") == "t..tctc."
    # The last step is taken for one more, and the first step of the next image is not taken for the last.
    assert company.play("ectctctv") == "ctctctce"


@pytest.mark.parametrize("later", [2, 5])
def test_another_number_of_steps_is_learnt_in_two_images(later: int) -> None:
    company = Company()
    for _ in range(3):
        company.play("etttv")
    image = "e" + "t" * later + "v"
    for _ in range(3):
        company.play(image)
    assert company.play(image) == "t" + "." * (later - 1) + "v" + "e"


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
