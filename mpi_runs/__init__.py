"""Experiments, one question a file, that ``python -m vpa.run NAME`` runs; ``results/`` holds the records that are kept."""
