"""Code that several test files share; import it as helpers.<module>."""
