"""The words of a command line: what they name, which are missing, and how fairseq parses them."""
