"""Copies of datasets for training: smaller folders, tars of shuffled records, near-duplicates."""
