"""Renders conversations with chat templates: finds what a template drops or refuses, and changes the form."""
