"""The paper's studies: grids of runs, each an ordinary workdir, collected into a table and a picture."""
