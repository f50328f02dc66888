"""From a command line and a file to what each part takes: flags, their values, and the options made of them."""
