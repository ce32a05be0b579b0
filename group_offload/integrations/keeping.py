"""Quantised models that were kept: a checkpoint of the library's own in the folder, opened in place the next time.

[Note: Kept models]
`quantised_<class>_<16 hex>` in the folder is what `save_pretrained` wrote, and `quantised.json` beside it, which is the last
file to come. It has the *identity* of the result: the facts of every file of the checkpoint, the class, the loader's options,
the quantisation config, the versions of the libraries, and the device that quantised. A kept model is opened if all of this is
equal now, and its own files are those that were written. Otherwise it is made anew. The name comes from what was asked for, so
that a changed checkpoint or another version takes the place of the old result. (Files that a process has open stay
readable to it.)

A result is kept only if the library opens it with the same bits: it is opened and compared before it gets its identity.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.layout import as_bytes
from ..base.mapping import expect_single_pages
from ..base.publish import folder_lock, publish_anew, sync_folder, temporary_name
from ..base.system import open_to_read, user
from ..base.torch_internals import is_traceable_wrapper_subclass
from ..errors import GroupFileError
from ..plan.budgets import describe_bytes
from ..stores.safetensors_file import content_of_file
from ..weights import plain_tensors, rewrap
from .casts import PostponedCasts, cast_now
from .quantising import Quantising, classes_of, patch

logger = logging.getLogger("group_offload")

PREFIX, RECORD, _FORMAT = "quantised_", "quantised.json", 1
_BASES = (("diffusers.models.modeling_utils", "ModelMixin"), ("transformers.modeling_utils", "PreTrainedModel"))
"""The classes that models of the libraries inherit `from_pretrained` from."""
_WHERE = {
    *("cache_dir", "force_download", "local_files_only", "proxies", "token", "use_auth_token"),
    *("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers", "low_cpu_mem_usage"),
    *("output_loading_info", "user_agent", "provider", "sess_options"),
}
"""Loader's options that say how a checkpoint is found and loaded, and not what comes of it."""
_WHICH = {
    "quantization_config",
    "config",
    "revision",
    "subfolder",
    "variant",
    "use_safetensors",
    "_commit_hash",
    "key_mapping",
}
"""Loader's options that the kept checkpoint has taken into account."""
_PACKAGES = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "quanto": "optimum-quanto",
    "sdnq": "sdnq",
    "modelopt": "nvidia-modelopt",
    "auto-round": "auto-round",
}
"""The package that does the work, by the method's name in a quantisation config."""
_NOT_THE_CHECKPOINT = ("group_", "manifest_", ".")
"""How names of files begin that do not belong to a checkpoint, even if its folder is the one for group files."""


class NotKept(Exception):
    """Why a result cannot be kept."""


class Keeper:
    """Keeps quantised models in a folder, for one call of a loader and in its thread. See [Note: Kept models]."""

    def __init__(
        self,
        casts: PostponedCasts,
        quantising: Quantising,
        folder_of: Callable[[str], Path | None],
        device: torch.device,
        *,
        is_verified: bool,
    ) -> None:
        """
        Args:
            folder_of: A function that returns the folder for the model that is loaded from a path, if there is one.
            device: The device that quantises, if the library wants one.
            is_verified: Whether the bytes of a kept model are compared with its hash before they are used.
        """
        self._casts = casts
        self._quantising = quantising
        self._folder_of = folder_of
        self._device = device
        self._is_verified = is_verified
        self._thread = threading.get_ident()
        self._is_inside = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        with ExitStack() as undo:
            for base in classes_of(_BASES):
                patch(undo, base, "from_pretrained", self._wrapped, self._thread, kind=classmethod)
            yield

    def _wrapped(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def from_pretrained(cls: type, name: Any, *args: Any, **options: Any) -> Any:
            folder = None if options.get("quantization_config") is None else self._folder_of(str(name))
            if folder is None or self._is_inside or args:
                return load(cls, name, *args, **options)
            self._is_inside = True
            try:
                return self._open(cls, name, options, folder, load)
            finally:
                self._is_inside = False

        return from_pretrained

    def _open(self, cls: type, name: Any, options: dict[str, Any], folder: Path, load: Callable[..., Any]) -> Any:
        try:
            asked, identity = identity_of(cls, name, options, self._device)
        except NotKept as reason:
            _say(name, reason)
            return load(cls, name, **options)
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        place = folder / f"{PREFIX}{cls.__name__}_{digest}"
        again = {key: value for key, value in options.items() if key not in _WHICH} | {"local_files_only": True}

        def reopen() -> Any:
            with _unread(self._thread), self._quantising.exact():
                found = load(cls, str(place), **again)
            _take_off_meta(_model_of(found))
            return found

        if _holds(place, identity, is_verified=self._is_verified):
            logger.info("%s was quantised before, and is opened from %s.", name, place)
            return _named(reopen(), name)
        _make_folder(place)
        with folder_lock(place):
            if _holds(place, identity, is_verified=self._is_verified):  # another process was quicker
                return _named(reopen(), name)
            _empty(place)
            try:
                # Quantisers write to their configs (which modules they leave out). The caller's stays what it is.
                config = copy.deepcopy(options["quantization_config"])
                loaded = load(cls, name, **{**options, "quantization_config": config})
                if self._casts.refusal is not None:  # it will be loaded again
                    return loaded
                if _checkpoint(name, options)[1] != identity["checkpoint files"]:
                    raise GroupFileError(
                        f"Another program changed {name} while it was being quantised, so that the result may be of the "
                        f"old weights and the new ones. Nothing was kept. Call from_pretrained again."
                    )
                kept = self._keep(loaded, place, identity, reopen)
            except NotKept as reason:
                _say(name, reason)
                model = _model_of(loaded)
                if hasattr(model, "register_to_config"):  # diffusers writes a dict there while it saves
                    model.register_to_config(quantization_config=model.hf_quantizer.quantization_config)
                return loaded
            finally:
                if not (place / RECORD).exists():
                    _empty(place, itself=True)
        return (_named(kept, name), *loaded[1:]) if isinstance(loaded, tuple) else _named(kept, name)

    def _keep(self, loaded: Any, place: Path, identity: Any, reopen: Callable[[], Any]) -> Any:
        """Save the model that was loaded, and open it again.

        Raises:
            NotKept: the library cannot save it, or opens another model.
            GroupFileError: there is no room.
        """
        model = _model_of(loaded)
        with self._casts.paused():
            cast_now(model, self._casts.casts_of(model))
        _make_folder(place)
        num_bytes = sum(plain.nbytes for _, plain in _tensors_of(model))
        free = shutil.disk_usage(place).free
        problem = f"{free:,} bytes are free" if num_bytes > free else ""
        if not problem:
            _check_can_be_saved(model)
            try:
                with self._casts.paused():
                    model.save_pretrained(place)
                _settle(place)
            except OSError as error:
                problem = str(error)
            except Exception as error:
                if "No space left" not in str(error):  # safetensors' own class of errors
                    raise NotKept(f"the library cannot save it ({type(error).__name__}: {error!s:.200})") from error
                problem = str(error)
        if problem:
            raise GroupFileError(
                f"Cannot keep the quantised model ({num_bytes:,} bytes) in {place.parent}: {problem}. Free some room "
                f"(`group-offload prune {place.parent}` removes what no model needs), or pass another folder as "
                f"offload_to_disk_path. The checkpoint is as it was."
            )
        try:
            found = reopen()
        except Exception as error:
            raise NotKept(f"the library cannot open what it saved ({type(error).__name__}: {error!s:.200})") from error
        kept = _model_of(found)
        with self._casts.paused():
            difference = _difference(model, kept)
        if not difference and self._casts.casts_of(kept):
            difference = "weights of another dtype"
        if difference:
            raise NotKept(f"the library saved something else: {difference}")
        os.close(publish_anew(place / RECORD, _encode({**identity, "files": _files_in(place)})))
        logger.info("The quantised model is kept in %s (%s).", place, describe_bytes(num_bytes))
        return kept


# ------------------------------------------------------------------------------------------------ identity


def identity_of(
    cls: type, name: Any, options: Mapping[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was asked for, and with it everything that the quantised weights depend on.

    Raises:
        NotKept: something of it cannot be told from one process to the next.
    """
    config = options["quantization_config"]
    method = _method_of(config)
    told = {key: value for key, value in options.items() if key not in _WHERE and key != "quantization_config"}
    where, checkpoint = _checkpoint(name, options)
    asked = {
        "format": _FORMAT,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "checkpoint": where,
        "options": _plain({key: value for key, value in told.items() if value is not None}),
        "quantisation": _plain(config),
    }
    packages = ["torch", "diffusers", "transformers", "accelerate", _PACKAGES.get(method, method)]
    machine = torch.backends.cpu.get_cpu_capability()
    if device.type != "cpu":
        machine = f"{machine}, {torch.get_device_module(device).get_device_name(device)}"
    return asked, {
        **asked,
        "checkpoint files": checkpoint,
        "versions": {package: _version(package) for package in packages},
        "machine": machine,
    }


def _checkpoint(name: Any, options: Mapping[str, Any]) -> tuple[str, Any]:
    """Where a checkpoint is, and facts that change if a byte of it does."""
    subfolder = options.get("subfolder") or ""
    path = Path(name)
    if path.is_dir():
        folder = (path / subfolder).resolve()
        found = {}
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_file() and not entry.name.startswith(_NOT_THE_CHECKPOINT):
                facts = entry.stat()
                found[entry.name] = [
                    facts.st_dev,
                    facts.st_ino,
                    facts.st_size,
                    facts.st_mtime_ns,
                    facts.st_ctime_ns,
                ]
        return str(folder), found
    try:
        from huggingface_hub import hf_hub_download

        keys = ("revision", "cache_dir", "token", "local_files_only")
        given = {key: options[key] for key in keys if options.get(key) is not None}
        config = Path(hf_hub_download(str(name), "config.json", subfolder=subfolder or None, **given))
    except Exception as error:
        raise NotKept(f"its config.json was not found ({type(error).__name__})") from error
    commit = config.parent.relative_to(next(part for part in config.parents if part.name == "snapshots")).parts[0]
    return f"{name}@{commit}/{subfolder}", commit


def _method_of(config: Any) -> str:
    method = config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method))


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _plain(value: Any) -> Any:
    """A value in terms of JSON, the same in each process.

    Raises:
        NotKept: there is no such form.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, (torch.dtype, torch.device, Path)):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if callable(getattr(value, "to_dict", None)):
        return [f"{type(value).__module__}.{type(value).__qualname__}", _plain(value.to_dict())]
    if is_dataclass(value) and not isinstance(value, type):
        return [f"{type(value).__module__}.{type(value).__qualname__}", _plain(asdict(value))]
    raise NotKept(f"nobody can tell whether its options are the same again: {type(value).__name__} has no to_dict")


# ------------------------------------------------------------------------------------------------ kept files


def _holds(place: Path, identity: Mapping[str, Any], *, is_verified: bool) -> bool:
    """Whether a kept model has this identity, and its files are as they were written."""
    trusted = {0, user()}
    try:
        record = json.loads((place / RECORD).read_text())
        files = record.pop("files")
        if record != identity or not (is_verified or (place / RECORD).stat().st_uid in trusted):
            return False
        for name, (size, mtime, content) in files.items():
            facts = (place / name).stat()
            if facts.st_size != size or not (is_verified or facts.st_uid in trusted):
                return False
            if (is_verified or facts.st_mtime_ns != mtime) and _content_of(place / name) != content:
                logger.warning("%s is not what was written there: the model is quantised again.", place / name)
                return False
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return False
    return True


@contextmanager
def _unread(thread: int) -> Iterator[None]:
    """Keep the system from reading ahead in files that the block maps: loaders touch the first byte of each weight."""
    mapped: list[torch.Tensor] = []

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def from_file(*args: Any, **kwargs: Any) -> Any:
            storage = call(*args, **kwargs)
            mapped.append(
                torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            )  # (loaders have another default)
            expect_single_pages(mapped[-1], expected=True)
            return storage

        return from_file

    with ExitStack() as undo:
        patch(undo, torch.UntypedStorage, "from_file", watched, thread, kind=staticmethod)
        yield
    for memory in mapped:
        expect_single_pages(memory, expected=False)


def _files_in(place: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(place.iterdir()):
        facts = path.stat()
        found[path.name] = [facts.st_size, facts.st_mtime_ns, _content_of(path)]
    return found


def _content_of(path: Path) -> str:
    fd = open_to_read(path)
    try:
        return content_of_file(fd, 0, lambda num_bytes: None)
    finally:
        os.close(fd)


def _make_folder(place: Path) -> None:
    try:
        place.mkdir(parents=True, exist_ok=True)
        probe = place / temporary_name("probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise GroupFileError(
            f"Cannot keep the quantised model in {place}: {error.strerror}. Pass a folder that this user can write to as "
            f"offload_to_disk_path."
        ) from error


def _empty(place: Path, *, itself: bool = False) -> None:
    """Remove what is there. Files are not written over: another process may have them mapped."""
    with suppress(OSError):
        for path in place.iterdir():
            path.unlink()
        if itself:
            place.rmdir()


def _settle(place: Path) -> None:
    """Give the files the mode that the umask asks for (safetensors does not), and sync them."""
    mode = place.stat().st_mode & 0o666
    for path in place.iterdir():
        path.chmod(mode)
    for path in place.iterdir():
        fd = os.open(path, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_folder(place)


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1, sort_keys=True).encode()


# ------------------------------------------------------------------------------------------------ models


def _check_can_be_saved(model: Any) -> None:
    """diffusers saves a model whose quantiser cannot, and only logs it."""
    quantiser = getattr(model, "hf_quantizer", None)
    can = getattr(quantiser, "is_serializable", True)
    if not (can() if callable(can) else can) or getattr(quantiser, "supports_safetensors_serialization", True) is False:
        raise NotKept(f"{type(quantiser).__name__} cannot save what it made")


def _take_off_meta(model: nn.Module) -> None:
    """Make wrappers anew that name the meta device while what is inside has bytes: so diffusers opens those of quanto.

    A LoRA is put on the device that its layer's weight names.
    """
    made: dict[torch.Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, holder in module._parameters.items():
            if holder is None or not holder.is_meta or not is_traceable_wrapper_subclass(holder):
                continue
            if holder not in made:  # a tied weight stays one
                with torch.no_grad():
                    made[holder] = nn.Parameter(rewrap(holder, {}), requires_grad=holder.requires_grad)
            module._parameters[name] = made[holder]


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, holder in (*module._parameters.items(), *module._buffers.items()):
            if holder is not None:
                fqn = f"{prefix}.{name}"
                yield from ((".".join((fqn, *path)), plain) for path, plain in plain_tensors(fqn, holder, module))


def _difference(model: nn.Module, kept: nn.Module) -> str:
    """The first thing in which two models differ: "" if there is none."""
    kinds = [[(name, type(part)) for name, part in each.named_modules()] for each in (model, kept)]
    if kinds[0] != kinds[1]:
        return "other modules"
    holders = [
        [(name, type(part)) for name, part in (*each.named_parameters(), *each.named_buffers())]
        for each in (model, kept)
    ]
    for mine, other in zip_longest(*holders):
        if mine != other:
            return f"{mine} is {other}"
    if on_meta := [name for name, part in kept.named_parameters() if part.is_meta]:
        return f"{on_meta[0]} is on the meta device"
    for mine, other in zip_longest(_tensors_of(model), _tensors_of(kept)):
        if mine is None or other is None or mine[0] != other[0]:
            return f"{mine and mine[0]} is {other and other[0]}"
        one, two = mine[1].detach(), other[1].detach()
        if one.dtype != two.dtype or one.shape != two.shape or one.stride() != two.stride():
            return f"{mine[0]} has another form"
        if one.numel() and not torch.equal(as_bytes(one), as_bytes(two)):
            return f"{mine[0]} has other bits"
    return ""


def _model_of(loaded: Any) -> Any:
    """The model in the result of a loader. With output_loading_info=True there is a dict beside it."""
    return loaded[0] if isinstance(loaded, tuple) else loaded


def _named(loaded: Any, name: Any) -> Any:
    """The model knows where it came from."""
    model = _model_of(loaded)
    if hasattr(model, "register_to_config"):
        model.register_to_config(_name_or_path=name)
    elif hasattr(model, "config"):
        model.name_or_path = model.config._name_or_path = str(name)
    return loaded


def _say(name: Any, reason: object) -> None:
    logger.warning("%s cannot be kept quantised, and is quantised again at the next start: %s.", name, reason)
