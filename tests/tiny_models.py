"""Checkpoints of the published encoders' architectures, tiny and random, with trained tokenizers.

Tokenizers learn their pieces from the texts a test uses, so that real texts give varied ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.3,
}


def save_byte_tokenizer(folder: Path, texts: Iterable[str], pieces: int = 2000) -> int:
    """Trains RoBERTa's kind of tokenizer, cased, and returns its size."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(
        texts, vocab_size=pieces, special_tokens=special, show_progress=False
    )
    trained.save_model(str(folder))
    tokenizer = RobertaTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_word_tokenizer(folder: Path, texts: Iterable[str], pieces: int = 2000) -> int:
    """Trains BERT's kind of tokenizer, uncased, and returns its size."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    trained = BertWordPieceTokenizer()
    # A real vocabulary has these, so TCT-ColBERT's prefixes are three pieces each.
    known = [*texts, "[q] [d]"]
    trained.train_from_iterator(known, vocab_size=pieces, show_progress=False)
    trained.save_model(str(folder))
    tokenizer = BertTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_ance(folder: Path, texts: Iterable[str], dim: int = 768, prefix: str = "roberta.") -> Path:
    """Writes RoBERTa with ANCE's head and norm; ``prefix`` is the backbone's in weight names."""
    import torch
    from safetensors.torch import save_file
    from transformers import RobertaConfig, RobertaModel

    size = save_byte_tokenizer(folder, texts)
    config = RobertaConfig(vocab_size=size, max_position_embeddings=514, **SIZE)
    config.architectures = ["AnceEncoder"]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        backbone = RobertaModel(config, add_pooling_layer=False)
        head, norm = torch.nn.Linear(config.hidden_size, dim), torch.nn.LayerNorm(dim)
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
        torch.nn.init.normal_(norm.bias, 0.0, 0.3)
    outer = "ance_encoder." if prefix.startswith("ance_encoder.") else ""
    state = {f"{prefix}{name}": value for name, value in backbone.state_dict().items()}
    state |= {f"{outer}embeddingHead.{name}": value for name, value in head.state_dict().items()}
    state |= {f"{outer}norm.{name}": value for name, value in norm.state_dict().items()}
    config.save_pretrained(folder)
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def save_bert(folder: Path, texts: Iterable[str], head: str = "BertModel") -> Path:
    """Writes BERT, as TCT-ColBERT is; ``head`` may be another class of the family."""
    import torch
    import transformers

    config = transformers.BertConfig(vocab_size=save_word_tokenizer(folder, texts), **SIZE)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        getattr(transformers, head)(config).save_pretrained(folder)
    return folder


def save_distilbert(folder: Path, texts: Iterable[str]) -> Path:
    """Writes DistilBERT, as TAS-B and SBERT are."""
    import torch
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig(
        vocab_size=save_word_tokenizer(folder, texts),
        dim=32,
        n_layers=2,
        n_heads=2,
        hidden_dim=64,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        DistilBertModel(config).save_pretrained(folder)
    return folder


def save_tprf(folder: Path, dim: int, fb_docs: int = 4) -> Path:
    """Writes a small TPRF network, none of its weights zero."""
    import torch

    from prf.tprf import Tprf
    from prf.tprf import save_tprf as save
    from prf.training_config import TprfNetwork

    with torch.random.fork_rng():
        torch.manual_seed(6)
        network = Tprf(TprfNetwork(fb_docs, layers=2, heads=2, feed_forward=16), dim)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    save(network, folder)
    return folder
