"""Speed on the machine at hand. Figures with their hardware are recorded in README.md beside this file."""
