"""The tests of edits of offloaded weights once more, where the kernel does not tell which pages were written: ever, or later.

Hazard: there edits are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from group_offload import apply_group_offloading
from group_offload.base.pagemap import can_detect_writes

from ..engine.weights import test_changes_in_forward, test_edits
from ..support import rigs
from ..support.fixtures import folder, level, offload, offload_either, tier  # noqa: F401
from ..support.page_map import PageMap
from . import test_checkpoint, test_files

pytestmark = pytest.mark.skipif(not can_detect_writes(), reason="this system does not tell which pages were written")

_EDITS: dict[Any, list[str]] = {
    test_changes_in_forward: ["test_forward_changes_its_own_tensors"],
    test_edits: ["test_edit_after_a_forward", "test_tied_weights"],
    test_files: ["test_verification_finds_flipped_bits"],
    test_checkpoint: ["test_edits"],
}
for _module, _names in _EDITS.items():
    for _name in _names:
        globals()[_name] = getattr(_module, _name)


@pytest.fixture(params=["never", "after set-up"], autouse=True)
def _writes_are_not_told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    page_map = PageMap(monkeypatch)
    arguments = request.node.callspec.params
    if arguments.get("tier") == "checkpoint":
        pytest.skip("asks the page map where a weight lies")

    def apply(*args: Any, **kwargs: Any) -> Any:
        page_map.allow()
        handle = apply_group_offloading(*args, **kwargs)
        page_map.refuse()
        return handle

    if request.param == "never":
        if arguments.get("with_folder") is False:
            pytest.skip("offload_device='disk' alone is refused then")
        page_map.refuse()
    else:
        for module in (rigs, test_checkpoint, test_files):
            monkeypatch.setattr(module, "apply_group_offloading", apply)
    yield
    page_map.allow()
