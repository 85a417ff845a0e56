"""Experiments: the lectures' claims, scaling laws, attention cost, loss landscapes."""
