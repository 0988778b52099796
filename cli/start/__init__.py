"""From the command line to the first update or translation: commands, logs, ranks."""
