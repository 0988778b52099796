"""BART pre-trained on captions, and German to English with and without it."""
