"""What goes in: calls and their arguments, structures, shapes, dtypes, variables, devices."""
