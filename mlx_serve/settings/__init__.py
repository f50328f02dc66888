"""Turns a command line and a file into settings: flags, their values, and the options that each part is given."""
