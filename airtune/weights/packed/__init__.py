"""Weights that are stored in fewer bits than they are computed with."""
