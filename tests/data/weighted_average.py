"""A feedback method as a user would write it: one file, registered by being imported."""

from dataclasses import dataclass

import numpy as np

from prf.feedback.base import Docs, Query, VectorFeedback


@dataclass(frozen=True, repr=False)
class WeightedAverage(VectorFeedback):
    """Weighted-average PRF.

    Needs: qid, query, query_vec, docno, score, doc_vec
    Gives: qid, query, query_vec

    Source: the example of this project's own documentation.
    """

    fb_docs: int = 3
    temperature: float = 1.0

    def reformulate(self, query: Query, docs: Docs) -> np.ndarray:
        w = np.exp((docs.scores - docs.scores.max()) / self.temperature)
        return (query.vec + (w / w.sum()) @ docs.vecs) / 2
