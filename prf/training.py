"""Training a model: what ``prf train`` calls, and the way to do it from Python."""

from __future__ import annotations

from typing import Any

from prf.distill.config import Distillation
from prf.errors import require
from prf.training_config import Training, read_config
from prf.trec import PathLike


def train(
    config: Training | Distillation | PathLike, *, force: bool = False, progress: bool = False
) -> dict[str, Any]:
    """Trains a model, or goes on with one that was interrupted.

    The output folder appears when all is done: the weights of the best dev figure (of the last
    update, without a dev set), ``config.json``, and ``training.json`` with the config, fingerprints
    of the data, versions and the figure of every epoch. Until then everything is in
    ``<output>.training``. Global random states and thread settings are as before afterwards.

    Args:
        config: A config, or the file of one.
        force: Replace a model that is there, and drop an unfinished training of another config.
        progress: Show bars with loss and dev figure on stderr.

    Returns:
        What training.json says.

    Raises:
        SpecError: For a wrong config, an output that exists, or an unfinished training of another
            config.
        MissingDependency: If a library or the device is not there.
        PrfError: If the loss is not finite, or whatever preparing the data raises; what was safe
            stays.
    """
    if not isinstance(config, (Training, Distillation)):
        config = read_config(config)
    for module in ("torch", "safetensors"):
        require(module, "train", "training")
    from prf.training_loop import run_training

    return run_training(config, force=force, progress=progress)
