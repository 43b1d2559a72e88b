"""VTAB-1k: fine-tuning on each of 19 tasks with 1,000 examples, and the table of their test accuracies."""
