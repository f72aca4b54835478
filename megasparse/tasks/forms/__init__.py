"""Forms of tasks: encoding, model, training and evaluation, one module per form."""
