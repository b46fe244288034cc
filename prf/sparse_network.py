"""A masked language model that weighs the terms of a new query, as it is trained.

Source: Zhu et al., LoL, SIGIR 2022, arXiv 2204.11545, the sparse reformulator ``dqrsm``: the
largest logit of each term over the input's tokens, ReLU, no logarithm, special terms left out,
weights at length 1 in the loss. With ``log1p`` it is SPLADE's encoder (Formal et al., SIGIR 2022,
arXiv 2205.04733). `prf.sparse_models.SpladeModel` computes the same when queries are answered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prf.checkpoints import quiet
from prf.errors import IndexStateError
from prf.frames import ObjectArray, objects
from prf.layouts import Reader, segments
from prf.sparse_models import allowed_terms, put_decoder, read_masked_model, take_decoder
from prf.training_config import SparseNetwork


class SparseEncoder(nn.Module):
    """Maps the ids of a query and its passages to a weight of at least 0 for every term.

    Attributes:
        reader: Packs the input.
        vocabulary: The terms, by column.
    """

    allowed: Tensor

    def __init__(self, config: SparseNetwork) -> None:
        super().__init__()
        where = f"model '{config.base}'"
        tokenizer, model = read_masked_model(config.base, where)
        model = model.float()
        decoder = model.get_output_embeddings()
        if not isinstance(decoder, nn.Linear) or decoder.out_features < len(tokenizer):
            raise IndexStateError(
                f"{where}: the head of {type(model).__name__} is no plain linear layer over its "
                f"{len(tokenizer)} terms; this model is not supported"
            )
        self.log = config.activation == "log1p"
        self.decoder = take_decoder(model)  # logits are made text by text, so the model stops here
        self.model, self.tokenizer = model, tokenizer
        self.reader = Reader.of("cls", tokenizer, int(model.config.max_position_embeddings), where)
        self.vocabulary: ObjectArray = objects(
            tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        )
        self.register_buffer(
            "allowed", torch.from_numpy(allowed_terms(tokenizer, config.skip)), persistent=False
        )

    def forward(self, ids: Tensor, mask: Tensor, *, two_parts: bool = False) -> Tensor:
        """Returns the weights, (n, terms) float32.

        Args:
            ids: (n, longest) int64.
            mask: (n, longest) bool, False for padding.
            two_parts: Give what follows the first [SEP] the second token type.
        """
        given = {"input_ids": ids, "attention_mask": mask}
        if two_parts and getattr(self.model.config, "type_vocab_size", 0) > 1:
            given["token_type_ids"] = segments(ids, self.reader.marks.sep)
        hidden = self.model(**given).logits.float()
        with torch.autocast(ids.device.type, enabled=False):  # logits in float32, as when served
            largest = torch.stack(
                [
                    LargestLogits.apply(hidden[row, real], self.decoder.weight)  # type: ignore[no-untyped-call]
                    for row, real in enumerate(mask)
                ]
            )
        if self.decoder.bias is not None:
            largest = largest + self.decoder.bias
        weights = largest[:, : len(self.vocabulary)].relu() * self.allowed
        return weights.log1p() if self.log else weights

    def save(self, folder: Path) -> None:
        """Writes it as a masked language model of transformers, with its tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(folder)
        hole = self.model.get_output_embeddings()
        put_decoder(self.model, hole, self.decoder)
        try:
            with quiet():
                self.model.save_pretrained(folder)
        finally:
            put_decoder(self.model, self.decoder, hole)


class LargestLogits(torch.autograd.Function):
    """The largest logit of every term over some tokens: (terms,) from (tokens, d) and (terms, d).

    Each term's gradient goes to one token only, the first of the largest, so that neither pass
    keeps logits: they would be the largest thing in memory by far.
    """

    BLOCK = 4096

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        parts = torch.split(weight, LargestLogits.BLOCK)
        largest, tokens = zip(*((hidden @ part.T).max(dim=0) for part in parts), strict=True)
        ctx.save_for_backward(hidden, weight, torch.cat(tokens))
        return torch.cat(largest)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, tokens = ctx.saved_tensors
        (terms,) = gradients[0].nonzero(as_tuple=True)  # what ReLU cut off needs nothing
        own, at = gradients[0][terms, None], tokens[terms]
        into_hidden = torch.zeros_like(hidden).index_add(0, at, own * weight[terms])
        into_weight = torch.zeros_like(weight).index_copy(0, terms, own * hidden[at])
        return into_hidden, into_weight
