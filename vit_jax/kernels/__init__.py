"""Forms of computations for one kind of device, behind `dispatch`; `models/` holds the reference in plain JAX."""
