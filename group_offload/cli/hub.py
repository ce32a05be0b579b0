"""What a repository of the Hugging Face hub holds, without its weights: configs, and the headers of its safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import StorageError
from .output import say_meanwhile

_MOST_SECONDS = 10
"""How long the hub may take to answer."""
_CONFIGS = re.compile(r"model_index\.json|config\.json|.*\.safetensors\.index\.json")


@contextmanager
def sketched(name: str) -> Iterator[Path]:
    """A folder that looks like one of the hub for as long as the context lasts.

    Configs are downloaded. Of a safetensors file only the header is: behind it the file is a hole, which takes no space.

    Args:
        name: `owner/model`, or a folder in it: `owner/model/transformer`.

    Raises:
        StorageError: the hub has no such model, does not answer, or wants a token.
    """
    owner, model, *inside = name.split("/")
    repository = f"{owner}/{model}"
    with TemporaryDirectory(prefix="group-offload-plan-") as temporary:
        folder = Path(temporary, *inside)
        try:
            _sketch(repository, PurePosixPath(*inside), Path(temporary))
        except Exception as error:  # the library's, and those of the one that it speaks HTTP with
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(". ")
            raise StorageError(
                f"There is no file or folder {name}, it is not downloaded, and the hub does not give it: {reason}. If it needs "
                f"a token: hf auth login. Without a network, download it where there is one: hf download {repository}"
            ) from error
        if not folder.is_dir():
            raise StorageError(f"{repository} has no folder {'/'.join(inside)}.")
        try:
            yield folder
        except StorageError as error:
            raise StorageError(str(error).replace(temporary, repository)) from error


def _sketch(repository: str, inside: PurePosixPath, folder: Path) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    found = api.model_info(repository, timeout=_MOST_SECONDS)
    files = [PurePosixPath(each.rfilename) for each in found.siblings or ()]
    is_pipeline = inside / "model_index.json" in files
    for file in files:
        depth = len(file.parts) - len(inside.parts)
        if ".." in file.parts or not file.is_relative_to(inside) or depth > 1 + is_pipeline:
            continue
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if _CONFIGS.fullmatch(file.name):
            api.hf_hub_download(repository, str(file), revision=found.sha, local_dir=folder)
        # Loaders of pipelines take none that lies beside the folders of their parts.
        elif file.suffix == ".safetensors" and depth > is_pipeline:
            say_meanwhile(f"Reading the header of {file} ...")
            _write_hole(folder / file, api.parse_safetensors_file_metadata(repository, str(file), revision=found.sha))


def _write_hole(path: Path, header: Any) -> None:
    """Write a safetensors file without its weights.

    Args:
        header: What it says of its tensors, `huggingface_hub.utils.SafetensorsFileMetadata`.
    """
    described: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    for name, tensor in header.tensors.items():
        described[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0))
