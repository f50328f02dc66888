"""What a chat template leaves out or refuses, found by probing it, and the forms that it is given instead."""
