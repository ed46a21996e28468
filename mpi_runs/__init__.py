"""Experiments, one question a file, for ``python -m vpa.run NAME``; ``results/`` holds the records that are kept."""
