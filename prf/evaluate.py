from prf.comparison import *
from prf.evaluation import *
from prf.tables import *
from prf.comparison import Comparison, compare
from prf.evaluation import PRESETS, Evaluation, evaluate, parse_measures
from prf.tables import render
