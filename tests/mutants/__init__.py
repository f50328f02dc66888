"""Small faults put into copies of the project's modules, to see whether a test notices."""
