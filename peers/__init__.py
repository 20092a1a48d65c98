"""One peer: a machine that trains and averages with others."""
