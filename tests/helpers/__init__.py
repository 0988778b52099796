"""What tests of several files share, and imports in each as helpers.<module>."""
