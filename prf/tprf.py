"""TPRF's network: a Transformer over the vectors of a query and of its feedback documents.

Source: Li, Yu, Mourad, Koopman, Zuccon, TPRF: A Transformer-based Pseudo-Relevance Feedback Model
for Efficient and Effective Retrieval, arXiv 2401.13509: the input ``[v_q; v_1; ...; v_k]``, a plain
Transformer encoder trained from scratch, and a query vector as output. What follows is our choice,
where we know of none in the paper: learned position embeddings, so that the rank is seen; the
output of position 0 through one linear map and a fixed factor; the sum with a vector that needs no
training (the query or Rocchio's), with a map that starts at zero, so that training starts from that
method; masking of missing documents, so that one network serves every depth.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from prf.checkpoints import check_device, fill
from prf.errors import IndexStateError, SpecError
from prf.index import read_json
from prf.training_config import TprfNetwork
from prf.trec import PathLike, write_json

KIND = "tprf"
WEIGHTS, CONFIG = "model.safetensors", "config.json"


class Tprf(nn.Module):
    """Maps a query vector and up to ``fb_docs`` document vectors to a new query vector.

    Attributes:
        config: The sizes.
        dim: Numbers in every vector.
    """

    def __init__(self, config: TprfNetwork, dim: int) -> None:
        super().__init__()
        if dim % config.heads:
            raise SpecError(
                f"network.heads is {config.heads}, which does not divide the {dim} dimensions of "
                "the vectors"
            )
        self.config, self.dim = config, dim
        self.positions = nn.Parameter(torch.empty(1 + config.fb_docs, dim))
        layer = nn.TransformerEncoderLayer(
            dim, config.heads, config.feed_forward, config.dropout, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.output = nn.Linear(dim, dim)
        self._fill()

    def _fill(self) -> None:
        nn.init.normal_(self.positions, std=0.02)
        for layer in self.encoder.layers:  # copies of one layer, which would all start the same
            for parameter in layer.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)
        if self.config.residual != "none":
            nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, queries: Tensor, documents: Tensor, present: Tensor) -> Tensor:
        """Returns the new query vectors: (b, d) float32.

        Args:
            queries: (b, d).
            documents: (b, k, d), best first; k at most ``config.fb_docs``, 0 allowed.
            present: (b, k), False where there is no document; what stands there has no influence.
        """
        documents = documents.masked_fill(~present[:, :, None], 0.0)  # NaN would pass any weight
        vectors = torch.cat([queries[:, None], documents], dim=1)
        own = torch.zeros(len(queries), 1, dtype=torch.bool, device=present.device)
        missing = torch.cat([own, ~present], dim=1)
        hidden = self.encoder(
            vectors + self.positions[: vectors.shape[1]], src_key_padding_mask=missing
        )
        new: Tensor = self.output(hidden[:, 0]).float()
        return self.config.scale * new + self._start(queries, documents, present)

    def _start(self, queries: Tensor, documents: Tensor, present: Tensor) -> Tensor:
        """Returns what the output is added to; Rocchio of no document is the query."""
        if self.config.residual == "none":
            return torch.zeros_like(queries)
        if self.config.residual == "query":
            return queries
        count = present.sum(dim=1, keepdim=True)
        mean = documents.sum(dim=1) / count.clamp(min=1)
        mixed = self.config.alpha * queries + self.config.beta * mean
        return torch.where(count > 0, mixed, queries)


def save_tprf(network: Tprf, folder: PathLike) -> None:
    """Writes ``model.safetensors`` and a readable ``config.json`` into a folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), str(folder / WEIGHTS), metadata={"format": "pt"})
    write_json({"kind": KIND, "dim": network.dim, **network.config.spec()}, folder / CONFIG)


def load_tprf(path: PathLike, device: str = "cpu") -> Tprf:
    """Opens a network for serving; the same folder gives the same object until it changes.

    Args:
        path: The folder that training made.
        device: ``cpu``, ``cuda``, ...

    Raises:
        IndexStateError: If it is missing, of another kind, or lacks weights.
        SpecError: For anything that names no device.
        MissingDependency: If the device is not there.
    """
    folder = Path(path)
    try:
        stamp = (folder / WEIGHTS).stat().st_mtime_ns
    except OSError as error:
        found = f"has no {WEIGHTS}" if folder.is_dir() else "is not there"
        raise IndexStateError(
            f"TPRF model '{folder}' {found}; train one with `prf train`"
        ) from error
    return _load(os.fspath(folder.resolve()), device, stamp)


@lru_cache(maxsize=8)
def _load(path: str, device: str, stamp: int) -> Tprf:
    where = f"TPRF model '{path}'"
    check_device(device, where)
    values: dict[str, Any] = read_json(Path(path) / CONFIG)
    if values.pop("kind", None) != KIND or not isinstance(dim := values.pop("dim", None), int):
        raise IndexStateError(f"{where}: {CONFIG} is not that of a TPRF model")
    try:
        with torch.random.fork_rng(devices=[]):
            network = Tprf(TprfNetwork.read(values), dim)
        fill(where, network, "", load_file(Path(path) / WEIGHTS), "a TPRF model")
    except (SpecError, SafetensorError) as error:
        raise IndexStateError(f"{where} cannot be read: {error}") from error
    return network.to(device).eval()
