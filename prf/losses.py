"""Losses of query vectors against document vectors that do not change.

All take a batch of queries and give one loss per query, so that methods may weigh and compare them.
Scores are inner products over a temperature. A query may have several relevant documents
("positives"): one of them is the label, the others are left out of the sum.

Source: the full softmax over frozen documents with the lowest-scoring positive as label: Zhu et
al., LoL, SIGIR 2022, arXiv 2204.11545. Sampled negatives: Yu et al., CIKM 2021, arXiv 2108.13454.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from prf.training_config import Label


def full_softmax(
    queries: Tensor,
    documents: Tensor,
    positives: Tensor,
    owners: Tensor,
    *,
    temperature: float,
    label: Label = "lowest",
    drawn: Tensor | None = None,
    chunk_rows: int = 65536,
) -> Tensor:
    """Returns the cross-entropy of each query over all documents, exactly.

    Loss and gradient do not depend on ``chunk_rows`` but for rounding; memory is that of the scores
    of one chunk, forward and backward.

    Args:
        queries: (b, d).
        documents: (n, d), on any device; moved chunk by chunk.
        positives: (m,) rows of ``documents``, at least one per query, sorted by query.
        owners: (m,) the query of each positive, ascending.
        temperature: Scores are divided by it.
        label: ``lowest``: the positive of lowest score, the first of equals. ``random``: those in
            ``drawn``. ``each``: the mean of the losses with each positive as label.
        drawn: (b,) place in ``positives`` of each query's label.
        chunk_rows: Documents scored at a time.

    Returns:
        (b,), at least 0.
    """
    scaled = queries / temperature
    rivals: Tensor = _LogSumExp.apply(  # type: ignore[no-untyped-call]
        scaled, documents, positives, owners, chunk_rows
    )
    chosen = _rows(documents, positives, scaled)
    scores = (scaled[owners] * chosen).sum(dim=1)
    if label == "each":
        losses = functional.softplus(rivals[owners] - scores, threshold=60)
        total = torch.zeros_like(rivals).index_add(0, owners, losses)
        return total / torch.bincount(owners, minlength=len(rivals))
    at = lowest(scores, owners) if drawn is None or label == "lowest" else drawn
    return functional.softplus(rivals - scores[at], threshold=60)


def sampled_softmax(
    queries: Tensor,
    documents: Tensor,
    positives: Tensor,
    owners: Tensor,
    negatives: Tensor,
    *,
    temperature: float,
    label: Label = "lowest",
    drawn: Tensor | None = None,
) -> Tensor:
    """Returns the cross-entropy of each query over its label and some drawn negatives.

    An approximation of `full_softmax` from below.

    Args:
        queries: (b, d).
        documents: (n, d).
        positives: As for `full_softmax`.
        owners: As for `full_softmax`.
        negatives: (b, s) rows, none of them a positive of the query; -1 where there is none.
        temperature: Scores are divided by it.
        label: ``lowest``, or ``random``: those in ``drawn``.
        drawn: (b,) place in ``positives`` of each query's label.
    """
    scaled = queries / temperature
    scores = (scaled[owners] * _rows(documents, positives, scaled)).sum(dim=1)
    at = lowest(scores, owners) if drawn is None or label == "lowest" else drawn
    vectors = _rows(documents, negatives.clamp(min=0).flatten(), scaled)
    against = torch.einsum("bd,bsd->bs", scaled, vectors.view(*negatives.shape, -1))
    against = against.masked_fill(negatives < 0, -torch.inf)
    return functional.softplus(against.logsumexp(dim=1) - scores[at], threshold=60)


def lowest(scores: Tensor, owners: Tensor) -> Tensor:
    """Returns the place of each query's lowest score, the first of equals: (b,).

    >>> lowest(torch.tensor([3.0, 1, 1, 5]), torch.tensor([0, 0, 0, 1])).tolist()
    [1, 3]
    """
    order = torch.sort(scores.detach(), stable=True).indices
    order = order[torch.sort(owners[order], stable=True).indices]
    sizes = torch.bincount(owners)
    return order[torch.cumsum(sizes, 0) - sizes]


def _rows(documents: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    return documents[rows.to(documents.device)].to(like.device, like.dtype)


class _LogSumExp(torch.autograd.Function):
    """Log of the summed exponentials of all scores but those of a query's positives: (b,).

    The scores are computed again on the way back, so that no chunk's are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Tensor, rows: Tensor, owners: Tensor, size: int
    ) -> Tensor:
        total = torch.full_like(queries[:, 0], -torch.inf)
        for start in range(0, len(documents), size):
            scores, _ = _scores(queries, documents, rows, owners, start, size)
            total = torch.logaddexp(total, scores.logsumexp(dim=1))
        ctx.save_for_backward(queries, documents, rows, owners, total)
        ctx.size = size
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        queries, documents, rows, owners, total = ctx.saved_tensors
        known = total.masked_fill(total == -torch.inf, 0)  # no rival at all: nothing to learn
        out = torch.zeros_like(queries)
        for start in range(0, len(documents), ctx.size):
            scores, chunk = _scores(queries, documents, rows, owners, start, ctx.size)
            out += (scores - known[:, None]).exp_() @ chunk
        return out * gradients[0][:, None], None, None, None, None


def _scores(
    queries: Tensor, documents: Tensor, rows: Tensor, owners: Tensor, start: int, size: int
) -> tuple[Tensor, Tensor]:
    """Returns the scores of one chunk of documents without the positives, and the chunk."""
    chunk = documents[start : start + size].to(queries.device, queries.dtype)
    scores = queries @ chunk.T
    inside = (rows >= start) & (rows < start + len(chunk))
    scores[owners[inside], rows[inside] - start] = -torch.inf
    return scores, chunk
