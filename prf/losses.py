"""Losses of query vectors against document vectors that do not change.

All take a batch of queries and give one loss per query, so that methods may weigh and compare them.
Scores are inner products over a temperature. A query may have several relevant documents
("positives"): one of them is the label, the others are left out of the sum. Documents are the rows
of a matrix, dense or sparse, of which the losses ask for products only.

Source: the full softmax over frozen documents with the lowest-scoring positive as label, and the
comparison of losses: Zhu et al., LoL, SIGIR 2022, arXiv 2204.11545. Sampled negatives: Yu et al.,
CIKM 2021, arXiv 2108.13454.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from prf.training_config import Label


class Matrix(Protocol):
    """Document vectors as rows, (n, d), and the three products that losses are made of."""

    def __len__(self) -> int:
        """Returns n."""
        ...

    def scores(self, queries: Tensor, start: int, stop: int) -> Tensor:
        """Returns the inner products with the rows from start to stop, (b, stop - start)."""
        ...

    def mixed(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """Returns the weighted sums of those rows: (b, d) from (b, stop - start)."""
        ...

    def paired(self, queries: Tensor, owners: Tensor, rows: Tensor) -> Tensor:
        """Returns the product of query ``owners[i]`` and row ``rows[i]``, (m,), with gradient."""
        ...


class DenseMatrix:
    """Rows of a tensor, which may live on another device than the queries and be mapped."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def scores(self, queries: Tensor, start: int, stop: int) -> Tensor:
        return queries @ self._part(slice(start, stop), queries).T

    def mixed(self, weights: Tensor, start: int, stop: int) -> Tensor:
        return weights @ self._part(slice(start, stop), weights)

    def paired(self, queries: Tensor, owners: Tensor, rows: Tensor) -> Tensor:
        return (queries[owners] * self._part(rows.to(self.rows.device), queries)).sum(dim=1)

    def _part(self, which: slice | Tensor, like: Tensor) -> Tensor:
        return self.rows[which].to(like.device, like.dtype)


class SparseMatrix:
    """Rows of weighted terms; row i owns the slice ``ptr[i]:ptr[i + 1]``.

    Args:
        ptr: (n + 1,) int64.
        terms: (m,) int64 columns, without repeats within a row.
        weights: (m,) float32.
        width: Number of columns.
        device: Where the products are computed.
    """

    def __init__(
        self,
        ptr: npt.NDArray[np.int64],
        terms: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float32],
        width: int,
        device: str = "cpu",
    ) -> None:
        self.ptr, self.width = torch.from_numpy(ptr).to(device), width
        self.terms = torch.from_numpy(terms).to(device)
        self.weights = torch.from_numpy(weights).to(device)

    def __len__(self) -> int:
        return len(self.ptr) - 1

    def scores(self, queries: Tensor, start: int, stop: int) -> Tensor:
        return (self._part(start, stop, queries.dtype) @ queries.T).T

    def mixed(self, weights: Tensor, start: int, stop: int) -> Tensor:
        return (self._part(start, stop, weights.dtype).t() @ weights.T).T

    def paired(self, queries: Tensor, owners: Tensor, rows: Tensor) -> Tensor:
        sizes = self.ptr[rows + 1] - self.ptr[rows]
        pair = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), sizes)
        before = torch.cumsum(sizes, 0) - sizes
        place = torch.arange(len(pair), device=rows.device) + (self.ptr[rows] - before)[pair]
        products = queries[owners[pair], self.terms[place]] * self.weights[place].to(queries.dtype)
        return queries.new_zeros(len(rows)).index_add(0, pair, products)

    def _part(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        first, last = int(self.ptr[start]), int(self.ptr[stop])
        rows = self.ptr[start : stop + 1] - first
        values = self.weights[first:last].to(dtype)
        size = (stop - start, self.width)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls its sparse rows new
            return torch.sparse_csr_tensor(
                rows, self.terms[first:last], values, size, check_invariants=False
            )


def full_softmax(
    queries: Tensor,
    documents: Matrix,
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
        documents: (n, d).
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
    scores = documents.paired(scaled, owners, positives)
    if label == "each":
        losses = functional.softplus(rivals[owners] - scores, threshold=60)
        total = torch.zeros_like(rivals).index_add(0, owners, losses)
        return total / torch.bincount(owners, minlength=len(rivals))
    at = lowest(scores, owners) if drawn is None or label == "lowest" else drawn
    return functional.softplus(rivals - scores[at], threshold=60)


def sampled_softmax(
    queries: Tensor,
    documents: Matrix,
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
    scores = documents.paired(scaled, owners, positives)
    at = lowest(scores, owners) if drawn is None or label == "lowest" else drawn
    drawers = torch.arange(len(scaled), device=scaled.device)
    drawers = drawers.repeat_interleave(negatives.shape[1])
    against = documents.paired(scaled, drawers, negatives.clamp(min=0).flatten())
    against = against.view(negatives.shape).masked_fill(negatives < 0, -torch.inf)
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


def comparative(losses: Tensor) -> Tensor:
    """Returns how much more feedback made each query's loss worse: (b,), at least 0.

    The mean of ``max(0, more - fewer)`` over all pairs of revisions; the gradient reaches both.
    One revision alone gives 0.

    >>> comparative(torch.tensor([[2.0, 1.5, 1.8]])).tolist()
    [0.23333334922790527]

    Args:
        losses: (b, r), of the revision with the most feedback first.

    Source: Zhu et al., LoL, SIGIR 2022, arXiv 2204.11545, comparative regularisation.
    """
    more, fewer = torch.triu_indices(losses.shape[1], losses.shape[1], offset=1)
    if len(more) == 0:
        return torch.zeros_like(losses[:, 0])
    return (losses[:, more] - losses[:, fewer]).relu().mean(dim=1)


class _LogSumExp(torch.autograd.Function):
    """Log of the summed exponentials of all scores but those of a query's positives: (b,).

    The scores are computed again on the way back, so that no chunk's are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, documents: Matrix, rows: Tensor, owners: Tensor, size: int
    ) -> Tensor:
        total = torch.full_like(queries[:, 0], -torch.inf)
        for start in range(0, len(documents), size):
            stop = min(start + size, len(documents))
            scores = _scores(queries, documents, rows, owners, start, stop)
            total = torch.logaddexp(total, scores.logsumexp(dim=1))
        ctx.save_for_backward(queries, rows, owners, total)
        ctx.documents, ctx.size = documents, size
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        queries, rows, owners, total = ctx.saved_tensors
        documents = ctx.documents
        known = total.masked_fill(total == -torch.inf, 0)  # no rival at all: nothing to learn
        out = torch.zeros_like(queries)
        for start in range(0, len(documents), ctx.size):
            stop = min(start + ctx.size, len(documents))
            scores = _scores(queries, documents, rows, owners, start, stop)
            out += documents.mixed((scores - known[:, None]).exp_(), start, stop)
        return out * gradients[0][:, None], None, None, None, None


def _scores(
    queries: Tensor, documents: Matrix, rows: Tensor, owners: Tensor, start: int, stop: int
) -> Tensor:
    """Returns the scores of one chunk of documents without the positives."""
    scores = documents.scores(queries, start, stop)
    inside = (rows >= start) & (rows < stop)
    scores[owners[inside], rows[inside] - start] = -torch.inf
    return scores
