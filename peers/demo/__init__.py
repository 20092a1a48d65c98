"""The demo: a bootstrap and some peers as processes of this machine, watched by their events."""
