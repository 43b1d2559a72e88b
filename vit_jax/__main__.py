"""`python -m vit_jax VERB ...` does what `vit-jax VERB ...` does."""

from vit_jax.cli import main

if __name__ == "__main__":
    main()
