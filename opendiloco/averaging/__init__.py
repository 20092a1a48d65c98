"""One round of averaging: what it promises, and who does it."""
