"""Pictures of models and of runs."""
