"""Models of a published layout: weights complete, of the right kind, with their head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from prf.checkpoints import fill, model_path, read_weights, reading, refuse_missing
from prf.errors import IndexStateError, require
from prf.layouts import Layout, Reader

BACKBONE = {"ance": "roberta", "tct": "bert"}
"""The architecture (``model_type`` of config.json) of layouts that have only one."""

HEAD = ("embeddingHead.", "norm.")
"""Start of the names of ANCE's own weights: a linear layer and LayerNorm."""

UNUSED = ("cls.", "lm_head.", "pooler.", "vocab_", "embeddings.position_ids")
"""Weights of pre-training heads and the like, which checkpoints may bring and no layout reads."""

ROBERTA = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Architectures that count positions from the one after padding's id."""


@dataclass(frozen=True, eq=False)
class Network:
    """The weights of a layout's model, shared by its encoders."""

    backbone: Any
    head: Any
    reader: Reader
    dim: int

    @property
    def token_types(self) -> int:
        """How many token types the backbone tells apart."""
        return int(getattr(self.backbone.config, "type_vocab_size", 0))


@lru_cache(maxsize=4)
def load_network(name: str, device: str, layout: Layout, half: bool, stamp: int) -> Network:
    """Opens the model of a layout, once for each stamp of its weights; see `read_network`."""
    return read_network(name, device, layout, half)


def read_network(name: str, device: str, layout: Layout, half: bool = False) -> Network:
    """Reads the model of a layout: weights of its own, which training may change.

    Args:
        name: Local folder or hub id.
        device: ``cpu``, ``cuda``, ...
        layout: What the model should be.
        half: Keep the backbone's weights in bfloat16; a head stays float32.

    Raises:
        IndexStateError: If it cannot be found or read, is of another architecture, lacks weights,
            or holds weights that the layout would leave out.
    """
    where = f"encoder '{name}'"
    transformers = require("transformers", "cpu", where)
    torch = require("torch", "cpu", where)
    path = model_path(name)
    expected = (
        "a local folder with config.json, model.safetensors (pytorch_model.bin is not read: save "
        "it again as safetensors) and tokenizer"
    )
    with reading(where, expected):
        config = transformers.AutoConfig.from_pretrained(path)
    needed = BACKBONE.get(layout, config.model_type)
    if config.model_type != needed:
        raise IndexStateError(
            f"{where}: layout '{layout}' needs a {needed} model, config.json says "
            f"'{config.model_type}' ({', '.join(config.architectures or ['no architecture'])})"
        )
    with reading(where, expected):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        weights = read_weights(path) if layout == "ance" else {}
        report: dict[str, Any] = {}
        if layout != "ance":
            backbone, report = transformers.AutoModel.from_pretrained(
                path, use_safetensors=True, output_loading_info=True
            )
    head = None
    if layout == "ance":
        backbone, head = _ance(where, config, weights)
    else:
        missing = [key for key in sorted(report["missing_keys"]) if not key.startswith("pooler.")]
        refuse_missing(where, missing, f"a model of layout '{layout}'")
        _refuse_unread(where, layout, sorted(report["unexpected_keys"]))
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None  # no layout reads it
    positions = int(getattr(config, "max_position_embeddings", 0))
    if config.model_type in ROBERTA:
        positions -= config.pad_token_id + 1
    return Network(
        backbone.to(device, torch.bfloat16 if half else torch.float32).eval(),
        None if head is None else head.to(device, torch.float32).eval(),
        Reader.of(layout, tokenizer, positions, where),
        int(config.hidden_size if head is None else head[0].out_features),
    )


def save_network(network: Network, folder: Path) -> None:
    """Writes a model so that `load_network` reads it with its layout: weights, config, tokenizer.

    Args:
        network: The model; weights are written as float32 safetensors.
        folder: Made if it is not there.
    """
    torch = require("torch", "cpu", "saving a model")
    folder.mkdir(parents=True, exist_ok=True)
    network.reader.tokenizer.save_pretrained(folder)
    network.backbone.config.save_pretrained(folder)
    state = network.backbone.state_dict()
    if network.head is not None:
        state = {f"roberta.{name}": value for name, value in state.items()}
        for place, prefix in enumerate(HEAD):
            own = network.head[place].state_dict()
            state |= {prefix + name: value for name, value in own.items()}
    save = require("safetensors.torch", "cpu", "saving a model").save_file
    whole = {name: value.to("cpu", torch.float32).contiguous() for name, value in state.items()}
    save(whole, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _ance(where: str, config: Any, weights: dict[str, Any]) -> tuple[Any, Any]:
    """Returns backbone and head, all of their weights from the checkpoint."""
    transformers = require("transformers", "cpu", where)
    torch = require("torch", "cpu", where)
    kind = "an ANCE model"
    weights = {name.removeprefix("ance_encoder."): value for name, value in weights.items()}
    if not any(name.startswith("roberta.") for name in weights):
        weights = {
            name if name.startswith(HEAD) else f"roberta.{name}": value
            for name, value in weights.items()
        }
    refuse_missing(where, [n for n in ("embeddingHead.weight",) if n not in weights], kind)
    size = weights["embeddingHead.weight"].shape[0]
    with torch.random.fork_rng(devices=[]):  # whatever is drawn here is overwritten or refused
        backbone = transformers.RobertaModel(config, add_pooling_layer=False)
        head = torch.nn.Sequential(
            torch.nn.Linear(config.hidden_size, size), torch.nn.LayerNorm(size)
        )
    fill(where, backbone, "roberta.", weights, kind)
    fill(where, head[0], HEAD[0], weights, kind)
    fill(where, head[1], HEAD[1], weights, kind)
    known = {f"roberta.{name}" for name in backbone.state_dict()}
    others = [name for name in sorted(weights) if name not in known and not name.startswith(HEAD)]
    _refuse_unread(where, "ance", [name.removeprefix("roberta.") for name in others])
    return backbone, head


def _refuse_unread(where: str, layout: Layout, unread: Sequence[str]) -> None:
    """Refuses a checkpoint with weights that the layout would leave out: another kind of model."""
    # ANCE was trained from a classifier, whose head some checkpoints still carry.
    allowed = (*UNUSED, "classifier.") if layout == "ance" else UNUSED
    unread = [name for name in unread if not name.startswith(allowed)]
    if unread:
        shown = ", ".join(unread[:3]) + (", ..." if len(unread) > 3 else "")
        raise IndexStateError(
            f"{where} holds weights that layout '{layout}' does not read: {shown}; it is a model "
            "of another kind, or its layout is another"
        )
