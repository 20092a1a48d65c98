"""The way in: a node on a public address that never trains."""
