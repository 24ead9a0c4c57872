"""All uses of TensorFlow's private names, each with its reason; no other module may use any.

TensorFlow's public interface cannot override a gradient in forward mode or in `tf.vectorized_map`,
nor free what a registered gradient holds. If a version of TensorFlow removes one of these names,
`tests/forms/test_tensorflow.py` fails and names what is missing.
"""
