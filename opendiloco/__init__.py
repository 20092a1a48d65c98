"""Low-communication training of language models over the internet: the library."""
