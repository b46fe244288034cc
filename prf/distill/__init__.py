"""Distillation of pairwise comparisons into pointwise students."""
