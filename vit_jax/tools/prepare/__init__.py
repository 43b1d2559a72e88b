"""Copies of data sets made before training: smaller folders, tars as shuffled records, near-duplicates."""
