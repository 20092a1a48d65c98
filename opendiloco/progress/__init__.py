"""What peers tell each other about how far they are."""
