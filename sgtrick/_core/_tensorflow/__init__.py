"""Every touch of TensorFlow's private names, each with its reason: nothing else may.

Nothing of TensorFlow's public interface says how to override a gradient in forward mode or in
`tf.vectorized_map`, nor frees what an override holds. `tests/test_tensorflow.py` fails with the
name of what is missing, should a version of TensorFlow take one of these away.
"""
