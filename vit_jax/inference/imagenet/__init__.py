"""ImageNet's 1,000 classes, and the sets of images that are evaluated in them: docs/imagenet.md."""
