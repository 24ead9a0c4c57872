"""What errors say about derivatives of the value form that are not known."""

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
