"""Losses of a pointwise student: over pairs, over lists, over single documents.

Every loss gives one number for each query, (b,). ``scores`` are (b, n), padded; what ``mask`` calls
no document counts nowhere, whatever stands there. A query without a pair, or without a document,
has loss 0 and no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from prf.distill.config import Scheme

SMALL = 1e-10
"""Floor of probabilities in `rank_loss`, as in the code the formula is from."""


@dataclass(frozen=True)
class Pairs:
    """Pairs of documents of some queries, and what the teacher said; each (m,).

    Attributes:
        owner: Row of the query in the scores.
        first: Column of one document.
        second: Column of the other.
        p: Probability that the first is better.
        margin: By how much it is.
        weight: Weight of the pair.
    """

    owner: Tensor
    first: Tensor
    second: Tensor
    p: Tensor
    margin: Tensor
    weight: Tensor

    def difference(self, scores: Tensor) -> Tensor:
        """Returns the first's score minus the second's, (m,)."""
        return scores[self.owner, self.first] - scores[self.owner, self.second]

    def mean(self, values: Tensor, weight: Tensor, count: int) -> Tensor:
        """Returns each query's weighted mean of a number per pair, (count,); 0 without pairs."""
        sums = values.new_zeros(count).index_add(0, self.owner, values * weight)
        total = values.new_zeros(count).index_add(0, self.owner, weight)
        return sums / torch.where(total > 0, total, torch.ones_like(total))


def logistic(scores: Tensor, pairs: Pairs, temperature: float = 1.0) -> Tensor:
    """Returns the cross-entropy between the teacher's p and the sigmoid of the score difference.

    With p of 1 or 0 this is RankNet (Burges et al., ICML 2005). A tie pulls two scores together;
    its least value is log 2.

    Args:
        scores: (b, n).
        pairs: Whose p and weight are read.
        temperature: Differences are divided by it.
    """
    x = pairs.difference(scores) / temperature
    losses = pairs.p * softplus(-x) + (1 - pairs.p) * softplus(x)
    return pairs.mean(losses, pairs.weight, len(scores))


def margin_mse(scores: Tensor, pairs: Pairs, factor: float = 1.0) -> Tensor:
    """Returns the mean squared error of score differences against ``factor`` times the margins."""
    losses = (pairs.difference(scores) - factor * pairs.margin) ** 2
    return pairs.mean(losses, pairs.weight, len(scores))


def hinge(scores: Tensor, pairs: Pairs) -> Tensor:
    """Returns the mean of ``max(0, 1 - difference)``, better minus worse; ties do not count."""
    win = torch.sign(pairs.p - 0.5)
    losses = torch.clamp(1 - win * pairs.difference(scores), min=0)
    return pairs.mean(losses, pairs.weight * win.abs(), len(scores))


def rank_loss(
    scores: Tensor,
    labels: Tensor,
    mask: Tensor,
    scheme: Scheme = "lambdarank",
    cutoff: int = 0,
    mu: float = 10.0,
) -> Tensor:
    """Returns a loss of the LambdaLoss family: log2-logistic, pairs weighed by what a swap costs.

    Documents stand in the order of their scores; D is log2(1 + rank), G the gain 2^y - 1 divided by
    the ideal DCG. The weights have no gradient. Wang et al., CIKM 2018, arXiv 1811.04415.

    Args:
        scores: (b, n).
        labels: (b, n), larger is better.
        mask: (b, n).
        scheme: Weight of a pair with y_i > y_j: ``none`` 1; ``lambdarank`` |1/D_i - 1/D_j| |G_i -
            G_j|; ``ndcgloss2`` the same with D of the distance of the two ranks and of one more;
            ``ndcgloss2pp`` ``mu`` times that plus lambdarank; ``diff`` |y_i - y_j|; ``squarediff``
            |y_i^2 - y_j^2|. ``ndcgloss1`` weighs every pair of two documents, G_i / D_i.
        cutoff: Only pairs of the first so many ranks count; 0 for all.
        mu: Factor in ``ndcgloss2pp``.
    """
    n = scores.shape[1]
    order = (
        scores.detach().masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    )
    s = scores.masked_fill(~mask, 0.0).gather(1, order)
    y = labels.masked_fill(~mask, 0.0).gather(1, order).to(scores.dtype)
    there = mask.gather(1, order)
    rank = torch.arange(1, n + 1, device=scores.device, dtype=scores.dtype)
    inside = there & (rank <= cutoff) if cutoff else there
    discount = torch.log2(1 + rank)
    with torch.no_grad():
        ideal = (2 ** y.masked_fill(~there, 0.0).sort(dim=1, descending=True).values - 1) / discount
        most = (ideal * (rank <= cutoff) if cutoff else ideal).sum(dim=1, keepdim=True)
        gain = (2**y - 1) / torch.where(most > 0, most, torch.ones_like(most))
        weight = _swap_weights(scheme, gain, y, discount, rank, mu)
    both = inside[:, :, None] & inside[:, None, :]
    if scheme == "ndcgloss1":
        counted = both
    else:
        counted = both & (y[:, :, None] > y[:, None, :])
    win = logsigmoid(s[:, :, None] - s[:, None, :])
    floor = torch.log(torch.tensor(SMALL, device=scores.device, dtype=scores.dtype))
    losses = -torch.maximum(weight * torch.maximum(win, floor), floor) / torch.log(
        torch.tensor(2.0, device=scores.device, dtype=scores.dtype)
    )
    return _mean(losses.flatten(1), counted.flatten(1))


def _swap_weights(
    scheme: Scheme, gain: Tensor, y: Tensor, discount: Tensor, rank: Tensor, mu: float
) -> Tensor:
    """Returns the weight of each pair of ranks, (b, n, n)."""
    if scheme == "none":
        return torch.ones_like(gain[:, :, None] - gain[:, None, :])
    if scheme == "diff":
        return (y[:, :, None] - y[:, None, :]).abs()
    if scheme == "squarediff":
        return (y[:, :, None] ** 2 - y[:, None, :] ** 2).abs()
    if scheme == "ndcgloss1":
        return (gain / discount)[:, :, None].expand(-1, -1, gain.shape[1])
    swapped = (gain[:, :, None] - gain[:, None, :]).abs()
    places = (1 / discount[:, None] - 1 / discount[None, :]).abs()
    apart = (rank[:, None] - rank[None, :]).abs().clamp(min=1)
    near = (1 / torch.log2(1 + apart) - 1 / torch.log2(2 + apart)).abs()
    if scheme == "lambdarank":
        return places * swapped
    if scheme == "ndcgloss2":
        return near * swapped
    return (mu * near + places) * swapped


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Returns the mean of what counts in each row; 0 where nothing does."""
    return values.masked_fill(~counted, 0.0).sum(dim=1) / counted.sum(dim=1).clamp(min=1)


def softmax(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Returns minus the log-probability of the document with the highest label, the first such."""
    best = labels.masked_fill(~mask, -torch.inf).argmax(dim=1, keepdim=True)
    chances = _log_softmax(scores, mask).gather(1, best)[:, 0]
    return -chances.masked_fill(~mask.any(dim=1), 0.0)


def listnet(scores: Tensor, labels: Tensor, mask: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the cross-entropy of two softmaxes: of the labels and of the scores.

    Cao et al., ICML 2007, top-one probabilities. Labels from 0 to 1 give a flat target at
    temperature 1; take a lower one.

    Args:
        scores: (b, n).
        labels: (b, n), larger is better.
        mask: (b, n).
        temperature: Labels are divided by it.
    """
    target = _log_softmax(labels.to(scores.dtype) / temperature, mask).exp()
    return -(target * _log_softmax(scores, mask)).masked_fill(~mask, 0.0).sum(dim=1)


def listmle(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Returns minus the log-likelihood of the labels' order (Xia et al., ICML 2008).

    Equal labels stand in the order of the columns.
    """
    order = labels.masked_fill(~mask, -torch.inf).argsort(dim=1, descending=True, stable=True)
    there = mask.gather(1, order)
    # A large negative number in place of minus infinity, whose gradient would be no number.
    s = scores.masked_fill(~mask, -1e30).gather(1, order)
    rest = s.flip(1).logcumsumexp(dim=1).flip(1)
    return (rest - s).masked_fill(~there, 0.0).sum(dim=1)


def _log_softmax(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the log-softmax of each row's documents; elsewhere 0."""
    known = values.masked_fill(~mask, -1e30).log_softmax(dim=1)
    return known.masked_fill(~mask, 0.0)


def rmse(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Returns the root of `mse`; its gradient at 0 is 0."""
    found = mse(scores, labels, mask)
    zero = found == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, found).sqrt())


def mse(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean squared error of scores against labels."""
    return _mean((scores - labels).masked_fill(~mask, 0.0) ** 2, mask)


def bce(scores: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean cross-entropy of labels from 0 to 1 against the sigmoid of the scores."""
    s = scores.masked_fill(~mask, 0.0)
    return _mean(labels * softplus(-s) + (1 - labels) * softplus(s), mask)
