"""Figures of speed, each beside a peer or a floor that is measured in the same run: `make bench`."""
