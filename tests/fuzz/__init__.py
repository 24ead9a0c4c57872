"""Programs drawn at random: a function with a rule of its own in a composition of transformations."""
