"""Figures of models and of runs."""
