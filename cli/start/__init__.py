"""From the command line to the first update or translation: flags, checks, ranks."""
