"""Batches on devices from stored images: sources, transforms, the order of examples, and their prefetching."""
