"""What happens between a command line and the first update or translation: flags, checks, ranks."""
