"""Weights in from and out to other projects: the only place where foreign names appear."""
