"""What errors say about derivatives that are not known."""

NO_SECOND = (
    "sgtrick.keras.custom_gradient was asked for a second derivative, but was given only a value "
    "and a gradient. Pass the Hessian or a function for Hessian-vector products as hx=, or hx=0 if "
    "the Hessian is zero; None in place of a block means that this block is zero."
)
NO_THIRD = (
    "sgtrick.keras.custom_gradient was asked for a third derivative, but was given only a value, a "
    "gradient and a Hessian. Apply keras.ops.stop_gradient to what need not be differentiated "
    "again."
)
# Of the function {0} of custom_vjp:
NO_ARGUMENT = (
    "{0} reads a tensor that is being differentiated but is not among its arguments, so its "
    "gradient is unknown. Pass it itself, not an object that holds it, as an argument, or apply "
    "keras.ops.stop_gradient to it."
)
NOT_CONNECTED = (
    "The gradient of {0} was differentiated again, but is not connected to the arguments: it is a "
    "constant, or keras.ops.stop_gradient or NumPy has cut it off. If it really is a constant, add "
    "0 * x to it. Otherwise compute it from the arguments themselves."
)
