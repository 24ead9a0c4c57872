"""What every form is made of: the kept override, the formula, and TensorFlow's private names."""
