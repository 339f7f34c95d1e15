"""Joins `weights` and `autograd` onto a transformers model."""
