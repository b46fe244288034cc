"""Feedback by networks that were trained on vectors: no text is read when a query is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from prf.errors import FrameError, SpecError, require
from prf.feedback.base import VectorFeedback
from prf.frames import FloatArray, IntArray, column, objects, stack
from prf.pipeline import Count, Depth, Resource

if TYPE_CHECKING:
    from prf.tprf import Tprf


@dataclass(frozen=True, repr=False)
class TPRF(VectorFeedback):
    """A trained Transformer makes the new query vector from the query's and the documents' vectors.

    Needs: qid, query, query_vec, docno, score, doc_vec
    Gives: qid, query, query_vec

    The network is trained for the vectors of one encoder (`prf train`); its input is ``[v_q; v_1;
    ...; v_k]``, best document first, with no text and no scores. ``query_vec`` is (d,) float32, not
    normalised. All queries of a call go through the network in batches. One model serves every
    depth up to the one it was trained for; a query with fewer documents is read with those it has.
    With none it keeps its vector, unless ``query_alone`` is set.

    Source: Li, Yu, Mourad, Koopman, Zuccon, TPRF: A Transformer-based Pseudo-Relevance Feedback
    Model for Efficient and Effective Retrieval, arXiv 2401.13509; what the network adds to that is
    said in `prf.tprf`.

    Args:
        model: Folder that ``prf train`` made; weights are read from safetensors.
        fb_docs: Feedback depth; at most the model's own.
        batch_size: Queries per forward pass; changes vectors by at most 1e-5.
        device: ``cpu``, ``cuda``, ...
        query_alone: Let the network rewrite queries without documents too (k = 0), as for a model
            that was trained without feedback.
    """

    model: str
    fb_docs: Depth = 3
    batch_size: Count = 256
    device: str = "cpu"
    query_alone: bool = False

    def resources(self) -> list[Resource]:
        return [Resource("TPRF model", self.model, self.model)]

    def new_queries(self, frame: pd.DataFrame, queries: pd.DataFrame) -> pd.DataFrame:
        old = stack(queries["query_vec"], repr(self), queries["qid"])
        counts = np.zeros(len(queries), dtype=np.int64)
        documents = np.zeros((len(queries), self.fb_docs, old.shape[1]), dtype=np.float32)
        for row, query, docs in self.feedback(frame, queries):
            if docs.vecs.shape[1] != old.shape[1]:
                raise FrameError(
                    f"{self!r}, qid {query.qid!r}: the query vector has {old.shape[1]} numbers, "
                    f"the document vectors {docs.vecs.shape[1]}; take both from one encoder"
                )
            counts[row] = len(docs)
            documents[row, : len(docs)] = docs.vecs
        rows = np.arange(len(queries)) if self.query_alone else np.flatnonzero(counts)
        new = old.copy()
        if len(rows):
            new[rows] = self._forward(old[rows], documents[rows], counts[rows])
            wrong = rows[~np.isfinite(new[rows]).all(axis=1)]
            if wrong.size:
                qid = queries["qid"].iloc[wrong[0]]
                raise FrameError(f"{self!r}: the new vector of qid {qid!r} is not finite")
        return queries.assign(query_vec=column(objects(new)))

    def _forward(self, queries: FloatArray, documents: FloatArray, counts: IntArray) -> FloatArray:
        torch = require("torch", "cpu", repr(self))
        network = self._network(queries.shape[1])
        present = np.arange(self.fb_docs) < counts[:, None]
        out = np.empty_like(queries)
        # Queries of one depth share batches, so that few positions are filled up and masked.
        order = np.argsort(counts, kind="stable")
        with torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                part = order[start : start + self.batch_size]
                deep = int(counts[part].max())
                given = (queries[part], documents[part, :deep], present[part, :deep])
                tensors = (torch.from_numpy(array).to(self.device) for array in given)
                out[part] = network(*tensors).cpu().numpy()
        return out

    def _network(self, dim: int) -> Tprf:
        from prf.tprf import load_tprf

        network = load_tprf(self.model, self.device)
        if network.config.fb_docs < self.fb_docs:
            raise SpecError(
                f"{self!r}: the model reads at most {network.config.fb_docs} documents; lower "
                "fb_docs, or train one that reads more"
            )
        if network.dim != dim:
            raise FrameError(
                f"{self!r}: the model is for vectors of {network.dim} numbers, query_vec has "
                f"{dim}; use the encoder that it was trained for"
            )
        return network
