"""Pairwise ranking prompting: a language model compares passages two at a time.

algorithms   rankings from comparisons, each as a generator of pairs
answers      questions, answers, and what two answers say about a pair
prompt       the prompt's text, and how passages are cut to fit
backend      who answers: the base, and a Python function
models       Hugging Face models, on this machine
server       any server that speaks OpenAI's chat protocol
cache        answers on disk
compare      many queries over one backend
statistics   counts, consistency, cycles
stage        the stage `PRP`
"""

from prf.prp.backend import Backend, Judge
from prf.prp.models import LocalModel
from prf.prp.server import ChatServer
from prf.prp.stage import PRP

__all__ = ["PRP", "Backend", "ChatServer", "Judge", "LocalModel"]
